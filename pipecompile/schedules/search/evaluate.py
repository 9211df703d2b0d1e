"""Evaluation of candidate schedules: the simulated step time and the peak memory."""

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
from pipecompile.schedules.search.workload import Workload, make_workload, with_tolerance, without_values
from pipecompile.simulation.costs import Costs
from pipecompile.simulation.from_program import tasks_of_program
from pipecompile.simulation.from_schedule import tasks_of_schedule
from pipecompile.simulation.host_launches import walk_with_hosts
from pipecompile.simulation.memory_curve import memory_curves

__all__ = ["Evaluator", "MemoryLimit"]


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The most that each device may hold: bytes including parameters if `in_bytes`, else micro-batches in flight."""

    capacity: tuple[float, ...]
    in_bytes: bool


@dataclass(frozen=True)
class Evaluator:
    """Evaluates schedules of one placement under one set of costs. `limit` None: memory is not bounded.

    Memory is in the unit of the limit, bytes or micro-batches in flight.
    """

    placement: tuple[int, ...]
    routes: tuple[Route, ...]
    costs: Costs
    limit: MemoryLimit | None

    def seconds(self, schedule: Schedule) -> float:
        """Return the makespan in seconds that `simulate` has under all costs; infinite if devices on one stream wait for each other."""
        times = walk_with_hosts(schedule, tasks_of_schedule(schedule, self.routes, self.costs), self.costs)
        return times.makespan if times.is_complete else inf

    def excess(self, schedule: Schedule) -> tuple[float, ...]:
        """Return a lower bound, per device, on the memory above the limit. All are 0 exactly if the schedule fits.

        What stages save is checked first; only if that fits are the buffers of values simulated as well.
        """
        if self.limit is None:
            return (0.0,) * schedule.n_devices
        saved = [self.peak_saved(row) + base for row, base in zip(schedule.rows, self.parameter_bytes, strict=True)]
        over = tuple(map(_over, saved, self.limit.capacity))
        if any(over) and self.limit.in_bytes:
            return over
        return tuple(map(_over, self.peaks(schedule), self.limit.capacity))

    def peaks(self, schedule: Schedule) -> tuple[float, ...]:
        """Return the peak memory of each device. A program is simulated only if the values on routes have a size."""
        if self.limit is None or not self.limit.in_bytes:
            return in_flight(schedule.rows, self.placement)
        if any(route.nbytes for route in self.routes):
            program = insert_frees(insert_transfers(lower_actions(schedule, self.routes)))
            tasks = tasks_of_program(program, self.costs)
            curves = memory_curves(tasks, walk_with_hosts(program, tasks, self.costs))
            peaks = [max((size for _, size in curve), default=0.0) for curve in curves]
        else:
            peaks = [self.peak_saved(row) for row in schedule.rows]
        return tuple(size + base for size, base in zip(peaks, self.parameter_bytes, strict=True))

    def workload(self, is_recomputed: Sequence[bool] | None = None, *, split: bool = True) -> Workload:
        """Return the workload with memory in the unit of the limit. A recomputed micro-batch in flight counts as any other."""
        workload = make_workload(self.placement, self.routes, self.costs, is_recomputed=is_recomputed, split=split)
        if self.limit is not None and not self.limit.in_bytes:
            saved = tuple(
                0.0 if flag else share for flag, share in zip(workload.is_recomputed, self.stage_share, strict=True)
            )
            workload = replace(
                without_values(workload), saved=saved, weight_saved=self.stage_share, recipe=self.stage_share
            )
        return workload

    @cached_property
    def capacity(self) -> tuple[float, ...]:
        """The memory of each device beside its parameters; infinite without a limit."""
        if self.limit is None:
            return (inf,) * (max(self.placement) + 1)
        base = self.parameter_bytes if self.limit.in_bytes else (0.0,) * len(self.limit.capacity)
        return tuple(whole - size for whole, size in zip(self.limit.capacity, base, strict=True))

    @cached_property
    def parameter_bytes(self) -> tuple[float, ...]:
        """Bytes of parameters per device."""
        totals = [0.0] * (max(self.placement) + 1)
        for stage, device in enumerate(self.placement):
            totals[device] += self.costs.parameters[stage]
        return tuple(totals)

    @cached_property
    def stage_share(self) -> tuple[float, ...]:
        """Per stage, the share of a micro-batch in flight that it counts: 1 / number of stages on its device."""
        return tuple(1 / self.placement.count(device) for device in self.placement)

    def peak_saved(self, row: Sequence[Action | None]) -> float:
        """Return the peak memory that the stages of a row save for their backward; 0 without a limit."""
        if self.limit is None:
            return 0.0
        recomputed = {(a.stage, a.microbatch) for a in row if a is not None and a.kind is Kind.RECOMPUTE}
        now = peak = 0.0
        for action in row:
            if action is not None:
                added, freed = self._memory_change(action, (action.stage, action.microbatch) in recomputed)
                peak = max(peak, now + added)
                now += added - freed
        return peak

    def _memory_change(self, action: Action, is_recomputed: bool) -> tuple[float, float]:
        """Return the memory that an action adds at its start, and the memory that it frees at its end."""
        s = action.stage
        if self.limit is not None and self.limit.in_bytes:
            saved, weight_saved, recipe = self.costs.saved[s], self.costs.weight_saved[s], self.costs.recipe[s]
        else:
            saved = weight_saved = recipe = self.stage_share[s]
        match action.kind:
            case Kind.FORWARD:
                return recipe if is_recomputed else saved, 0.0
            case Kind.RECOMPUTE:
                return saved if self.limit and self.limit.in_bytes else recipe, recipe
            case Kind.BACKWARD:
                return 0.0, saved
            case Kind.INPUT_GRAD:
                return 0.0, saved - weight_saved
            case Kind.WEIGHT_GRAD:
                return 0.0, weight_saved
            case Kind.OFFLOAD:
                return 0.0, saved
            case Kind.RELOAD:
                return saved, 0.0
            case Kind.UNSHARD | Kind.RESHARD | Kind.REDUCE_GRAD:
                return 0.0, 0.0


def _over(size: float, capacity: float) -> float:
    """Return how far `size` exceeds `capacity`; 0 within the tolerance."""
    return size - capacity if size > with_tolerance(capacity) else 0.0
