"""How long a schedule takes, and whether it fits: what a search asks of every candidate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from pipecompile.ir import Action, Kind, Route, Schedule
from pipecompile.ir.in_flight import in_flight
from pipecompile.passes.liveness import insert_frees
from pipecompile.passes.lower_actions import lower_actions
from pipecompile.passes.transfers import insert_transfers
from pipecompile.schedules.search.workload import Work, within, work_of
from pipecompile.simulation.costs import Costs
from pipecompile.simulation.event_walk import walk
from pipecompile.simulation.from_program import tasks_of_program
from pipecompile.simulation.from_schedule import tasks_of_schedule
from pipecompile.simulation.memory_curve import curves

__all__ = ["Judge", "Limit"]


@dataclass(frozen=True, slots=True)
class Limit:
    """What each device may hold: bytes, or micro-batches in flight, or as much as it likes."""

    room: tuple[float, ...]
    in_bytes: bool


@dataclass(frozen=True)
class Judge:
    """Judges schedules of one placement under one set of costs."""

    placement: tuple[int, ...]
    routes: tuple[Route, ...]
    costs: Costs
    limit: Limit | None

    def seconds(self, schedule: Schedule) -> float:
        """The simulated step."""
        return walk(tasks_of_schedule(schedule, self.routes, self.costs), self.costs.engines).makespan

    def excess(self, schedule: Schedule) -> tuple[float, ...]:
        """Per device, by how much it holds more than it may, at least; all zero just for what fits."""
        if self.limit is None:
            return (0.0,) * schedule.n_devices
        saved = [self.held(row) + base for row, base in zip(schedule.rows, self.constant, strict=True)]
        beyond = tuple(map(_beyond, saved, self.limit.room))
        if any(beyond) and self.limit.in_bytes:
            return beyond
        return tuple(map(_beyond, self.peaks(schedule), self.limit.room))

    def peaks(self, schedule: Schedule) -> tuple[float, ...]:
        """The most that each device holds at one time, in the unit of the limit; values without a size need no walk."""
        if self.limit is None or not self.limit.in_bytes:
            return in_flight(schedule.rows, self.placement)
        if any(route.nbytes for route in self.routes):
            program = insert_frees(insert_transfers(lower_actions(schedule, self.routes)))
            tasks = tasks_of_program(program, self.costs)
            found = curves(tasks, walk(tasks, self.costs.engines))
            held = [max((size for _, size in curve), default=0.0) for curve in found]
        else:
            held = [self.held(row) for row in schedule.rows]
        return tuple(size + base for size, base in zip(held, self.constant, strict=True))

    def work(self, again: Sequence[bool] | None = None, *, split: bool = True) -> Work:
        """In the unit of the limit. Among micro-batches in flight, one that is recomputed counts as any other."""
        work = work_of(self.placement, self.routes, self.costs, again=again, split=split)
        if self.limit is not None and not self.limit.in_bytes:
            saved = tuple(0.0 if bare else share for bare, share in zip(work.again, self.share, strict=True))
            work = replace(work, saved=saved, weight_saved=self.share, kept=self.share)
        return work

    @cached_property
    def room(self) -> tuple[float, ...]:
        """What a device may hold beside its parameters."""
        if self.limit is None:
            return (inf,) * (max(self.placement) + 1)
        constant = self.constant if self.limit.in_bytes else (0.0,) * len(self.limit.room)
        return tuple(room - base for room, base in zip(self.limit.room, constant, strict=True))

    @cached_property
    def constant(self) -> tuple[float, ...]:
        """Bytes of parameters per device."""
        totals = [0.0] * (max(self.placement) + 1)
        for stage, device in enumerate(self.placement):
            totals[device] += self.costs.parameters[stage]
        return tuple(totals)

    @cached_property
    def share(self) -> tuple[float, ...]:
        """What a stage counts among the micro-batches in flight."""
        return tuple(1 / self.placement.count(device) for device in self.placement)

    def held(self, row: Sequence[Action | None]) -> float:
        """The most that the stages of a row have saved at one time, in the unit of the limit; 0 without one."""
        if self.limit is None:
            return 0.0
        again = {(a.stage, a.microbatch) for a in row if a is not None and a.kind is Kind.RECOMPUTE}
        now = most = 0.0
        for action in row:
            if action is not None:
                more, less = self._change(action, (action.stage, action.microbatch) in again)
                most = max(most, now + more)
                now += more - less
        return most

    def _change(self, action: Action, is_again: bool) -> tuple[float, float]:
        """What an action adds when it starts, and takes away when it ends."""
        s = action.stage
        if self.limit is not None and self.limit.in_bytes:
            saved, left, recipe = self.costs.saved[s], self.costs.weight_saved[s], self.costs.recipe[s]
        else:
            saved = left = recipe = self.share[s]
        match action.kind:
            case Kind.FORWARD:
                return recipe if is_again else saved, 0.0
            case Kind.RECOMPUTE:
                return saved if self.limit and self.limit.in_bytes else recipe, recipe
            case Kind.BACKWARD:
                return 0.0, saved
            case Kind.INPUT_GRAD:
                return 0.0, saved - left
            case Kind.WEIGHT_GRAD:
                return 0.0, left


def _beyond(size: float, room: float) -> float:
    return size - room if size > within(room) else 0.0
