"""Modulo schedules: the start of each action of one micro-batch; that of the next one is a period later.

    period 3     device 0    F0 .. .. F1 I0 W0 F2 I1 W1 F3 ...         each action of micro-batch m starts m periods after that of 0
                 device 1       F0 I0 W0 F1 I1 W1 F2 ...

`ModuloPlacer` takes the actions in the order F, I, W and starts each as early as its inputs and the reserved devices permit, after a
delay of its own. Repeated blocks of a schedule are the building blocks of Qi et al., "Pipeline Parallelism with Controllable Memory",
2024, there chosen by hand for stages of equal time. `Reservations` is the reservation table of Rau, "Iterative Modulo Scheduling", MICRO 1994,
with seconds instead of clock cycles:

    period 4     device 0    F0 F0 .. I0 │ F0 F0 .. I0 │ ...       [2, 3) is free, and so is [6, 7)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor

from pipecompile.ir import Action, Kind, Schedule
from pipecompile.schedules.search.workload import Workload, senders

__all__ = ["ModuloPlacer", "ModuloSchedule", "Reservations"]

_Placed = tuple[Kind, int, float, float]
"""Kind and stage of an action, and its start and end in seconds."""


@dataclass(frozen=True, slots=True)
class ModuloSchedule:
    """The `period` in seconds, and the actions of micro-batch 0."""

    period: float
    actions: tuple[_Placed, ...]

    @property
    def span(self) -> float:
        """The seconds of one micro-batch."""
        return max(end for _, _, _, end in self.actions)

    def schedule(self, workload: Workload, n_microbatches: int) -> Schedule:
        """Return the schedule of `n_microbatches` micro-batches: on each device, the actions by their start."""
        rows: list[list[tuple[float, float, int, Action]]] = [[] for _ in range(workload.n_devices)]
        for order, (kind, s, start, end) in enumerate(self.actions):
            row = rows[workload.placement[s]]
            for m in range(n_microbatches):
                row.append((start + m * self.period, end + m * self.period, order, Action(s, kind, m)))
        ordered = (sorted(row, key=lambda entry: entry[:3]) for row in rows)
        actions = tuple(tuple(action for *_, action in row) for row in ordered)
        return Schedule(workload.n_stages, n_microbatches, workload.placement, actions)


class ModuloPlacer:
    """Places the actions of a workload. `n_delays`: one before each F, then one before each I (or R and I)."""

    def __init__(self, workload: Workload) -> None:
        self.workload, self.n_delays = workload, 2 * workload.n_stages
        self.before_f = senders(workload.forward_transfers, workload.n_stages)
        self.before_i = senders(workload.gradient_transfers, workload.n_stages)
        self.backward = workload.input_grad if workload.split else workload.backward
        self.kind = Kind.INPUT_GRAD if workload.split else Kind.BACKWARD

    def place(self, period: float, delays: Sequence[float]) -> ModuloSchedule | None:
        """Return the modulo schedule with these delays in seconds; None if a device has no room for an action in a period."""
        table, actions = Reservations(period, self.workload.n_devices), list[_Placed]()
        forward_ends = self._place_forwards(table, delays[: self.workload.n_stages], actions)
        if forward_ends is None:
            return None
        backward_ends = self._place_backwards(table, delays[self.workload.n_stages :], actions, forward_ends)
        if backward_ends is None or not self._place_weight_grads(table, actions, backward_ends):
            return None
        return ModuloSchedule(period, tuple(actions))

    def _place_forwards(
        self, table: Reservations, delays: Sequence[float], actions: list[_Placed]
    ) -> list[float] | None:
        """Append F of all stages, and return their ends; None if one has no room."""
        work, ends = self.workload, list[float]()
        for s in range(work.n_stages):
            ready = max((ends[a] + seconds for a, seconds in self.before_f[s]), default=0.0) + delays[s]
            start = table.reserve(work.placement[s], ready, work.forward[s])
            if start is None:
                return None
            ends.append(start + work.forward[s])
            actions.append((Kind.FORWARD, s, start, ends[s]))
        return ends

    def _place_backwards(
        self, table: Reservations, delays: Sequence[float], actions: list[_Placed], forward_ends: Sequence[float]
    ) -> list[float] | None:
        """Append I or B of all stages, with R at once before them, and return their ends; None if one has no room."""
        work, ends = self.workload, [0.0] * self.workload.n_stages
        for s in reversed(range(work.n_stages)):
            again = work.recompute[s] if work.is_recomputed[s] else 0.0
            ready = max(forward_ends[s], *(ends[a] + seconds - again for a, seconds in self.before_i[s]), 0.0)
            start = table.reserve(work.placement[s], ready + delays[s], again + self.backward[s])
            if start is None:
                return None
            if work.is_recomputed[s]:
                actions.append((Kind.RECOMPUTE, s, start, start + again))
            ends[s] = start + again + self.backward[s]
            actions.append((self.kind, s, start + again, ends[s]))
        return ends

    def _place_weight_grads(self, table: Reservations, actions: list[_Placed], ready: Sequence[float]) -> bool:
        """Append W in what is left of the devices, the longest first; return whether each has room."""
        work = self.workload
        for s in sorted(range(work.n_stages), key=lambda s: -work.weight_grad[s]) if work.split else ():
            start = table.reserve(work.placement[s], ready[s], work.weight_grad[s])
            if start is None:
                return False
            actions.append((Kind.WEIGHT_GRAD, s, start, start + work.weight_grad[s]))
        return True


_TOLERANCE = 1e-9
"""Share of a period by which intervals may overlap: rounding."""


class Reservations:
    """The reserved intervals of each device, repeated every `period` seconds. An interval starts within the first period."""

    def __init__(self, period: float, n_devices: int) -> None:
        self.period, self.tolerance = period, _TOLERANCE * period
        self.intervals: list[list[tuple[float, float]]] = [[] for _ in range(n_devices)]

    def reserve(self, device: int, earliest: float, seconds: float) -> float | None:
        """Reserve `seconds` from the first free time at or after `earliest`, and return it; None if no period has room for them."""
        if seconds <= 0:
            return earliest
        if seconds > self.period + self.tolerance:
            return None
        start = earliest
        while (end := self._conflict(device, start, seconds)) is not None:
            start = end
            if start > earliest + self.period + self.tolerance:
                return None
        within = start - floor(start / self.period) * self.period
        self.intervals[device].append((within, within + seconds))
        return start

    def _conflict(self, device: int, start: float, seconds: float) -> float | None:
        """Return the end of a reservation that overlaps [start, start + seconds); None if it is free."""
        base = floor(start / self.period) * self.period
        first, last = start - base + self.tolerance, start - base + seconds - self.tolerance
        for begin, end in self.intervals[device]:
            for shift in (-self.period, 0.0, self.period):
                if begin + shift < last and first < end + shift:
                    return base + end + shift
        return None
