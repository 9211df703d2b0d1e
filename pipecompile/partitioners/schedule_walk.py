"""The seconds of a step of one cut under the order of a given schedule, which the formulas of `step_objective.py` do not consider.

    device 0   F0 F1 . . . B0 F2 . B1 . B2        The schedule says what each device does after what. The cut says how long that
    device 1      F0 B0 F1 B1 . F2 B2             takes, and which stages wait for which. A walk adds this up, action after action.

Two neighbours of a chain in balance wait for each other's transfers, (t0 + t1 + transfers) / 2 seconds a micro-batch, though neither
does so much work. A link takes one transfer after the other in each direction, in the order of the walk. A walk is a tenth of the
effort of a simulation, because the cut needs no routes, and the order is prepared once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipecompile.ir import Action, Kind, Schedule
from pipecompile.ir.directions import placement_of
from pipecompile.partitioners.cut_arrays import Edge

__all__ = ["MAX_ACTIONS", "ScheduleWalk"]

MAX_ACTIONS = 640
"""Actions of a schedule that is walked: most of a millisecond."""

_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD, Kind.RECOMPUTE)
"""The kinds that a walk knows. The seconds of a recomputation are those of its backward."""

Waits = list[list[tuple[int, float]]]
"""Per stage, the stages from which something arrives, with the seconds of the transfers one way."""


@dataclass(frozen=True, slots=True)
class ScheduleWalk:
    """The actions of a schedule in an order in which each stage has all it could wait for. `placements[m][s]` is the device of stage s
    for micro-batch m.
    """

    actions: tuple[tuple[Kind, int, int], ...]
    placements: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, schedule: Schedule) -> ScheduleWalk | None:
        """Return the walk of a schedule; None if it has too many actions, others than computations, or only runs along fewer
        dependencies than those of a chain.
        """
        actions = [action for row in schedule.rows for action in row]
        if len(actions) > MAX_ACTIONS or schedule.n_slices > 1 or any(a.kind not in _KINDS for a in actions):
            return None
        ordered = _in_order(schedule)
        if ordered is None:
            return None
        cells = tuple((a.kind, a.stage, a.microbatch) for a in ordered if a.kind is not Kind.RECOMPUTE)
        moved = placement_of(schedule)
        return cls(cells, tuple(moved.get(m, schedule.placement) for m in range(schedule.n_microbatches)))

    def seconds(self, times: Sequence[float], forward: Sequence[float], edges: Sequence[Edge]) -> float:
        """Return the seconds of a step. `times` and `forward` are those of each stage, forward and back, and forward alone.

        A divided backward delays other stages by one half of it.
        """
        back = [time - first for time, first in zip(times, forward, strict=True)]
        half = [seconds / 2 for seconds in back]
        takes = {Kind.FORWARD: forward, Kind.BACKWARD: back, Kind.INPUT_GRAD: half, Kind.WEIGHT_GRAD: half}
        earlier, later = self._waits(edges)
        free = [0.0] * (1 + max(map(max, self.placements)))
        links: dict[tuple[int, int], float] = {}
        done: tuple[list[list[float]], ...] = tuple([[0.0] * len(self.placements) for _ in times] for _ in range(2))
        for kind, stage, microbatch in self.actions:
            placement = self.placements[microbatch]
            device = placement[stage]
            begin = free[device]
            if kind is not Kind.WEIGHT_GRAD:
                is_forward = kind is Kind.FORWARD
                ends = done[not is_forward]
                for other, delay in (earlier if is_forward else later)[stage]:
                    arrival = ends[other][microbatch]
                    if delay:
                        link = placement[other], device
                        arrival = links[link] = max(arrival, links.get(link, 0.0)) + delay
                    begin = max(begin, arrival)
                ends[stage][microbatch] = begin + takes[kind][stage]
            free[device] = begin + takes[kind][stage]
        return max(free)

    def _waits(self, edges: Sequence[Edge]) -> tuple[Waits, Waits]:
        """Return the (stage, seconds of a transfer) pairs for which the forwards, and the backwards, of every stage wait."""
        earlier: Waits = [[] for _ in self.placements[0]]
        later: Waits = [[] for _ in self.placements[0]]
        for (a, b), delay in edges:
            earlier[b].append((a, delay / 2))
            later[a].append((b, delay / 2))
        return earlier, later


def _in_order(schedule: Schedule) -> list[Action] | None:
    """Return the actions of all devices so that each comes after what it could wait for in a chain of stages; None if none is so."""
    ordered: list[Action] = []
    done: set[tuple[bool, int, int]] = set()
    position = [0] * schedule.n_devices
    while True:
        before = len(ordered)
        for device, row in enumerate(schedule.rows):
            while position[device] < len(row) and _is_ready(row[position[device]], done, schedule.n_stages):
                action = row[position[device]]
                position[device] += 1
                ordered.append(action)
                if action.kind not in (Kind.WEIGHT_GRAD, Kind.RECOMPUTE):
                    done.add((action.kind is Kind.FORWARD, action.stage, action.microbatch))
        if len(ordered) == before:
            return ordered if len(ordered) == sum(map(len, schedule.rows)) else None


def _is_ready(action: Action, done: set[tuple[bool, int, int]], n_stages: int) -> bool:
    """Return whether the neighbour in the chain, which an action could wait for, has run."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.FORWARD:
        return stage == 0 or (True, stage - 1, microbatch) in done
    if action.kind in (Kind.BACKWARD, Kind.INPUT_GRAD) and stage < n_stages - 1:
        return (False, stage + 1, microbatch) in done
    return True
