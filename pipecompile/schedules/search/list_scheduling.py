"""List scheduling: a free device starts the ready action with the best priority.

    F, I, B    in the order of a priority rule; a forward needs memory for what it saves
    R          early, if nothing else is ready: restores the forward for the next backward
    W          last: no action depends on W, so it fills idle time

Every stage runs its micro-batches in ascending order. Memory per device is bounded in bytes or any other unit, and a quota per
stage bounds the forwards whose backward has not run.

A device with recomputed stages reserves a restore buffer, as large as its largest such stage: it holds what R restores for one
micro-batch. Deadlock avoidance follows the banker's algorithm (Dijkstra, EWD 623): a forward starts only if the remaining memory
lets the oldest micro-batches finish one after another. So some action can always run. O(n log n) for n actions, times the number
of stages on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from pipecompile.ir import Action, Kind
from pipecompile.schedules.search.workload import Transfer, Transfers, Workload, with_tolerance

__all__ = ["ListSchedule", "PriorityRule", "list_schedule"]

_FILLER = 1e9
"""Rank from which on an action (early R, then W by age) only fills idle time."""


@dataclass(frozen=True, slots=True)
class ListSchedule:
    """The rows of a schedule, one per device, and the seconds that it takes."""

    rows: tuple[tuple[Action, ...], ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class PriorityRule:
    """The free choices of a list schedule.

    `in_flight[s]`: quota of forwards of stage s whose backward has not run. `forward[s]`, `backward[s]`: ranks, lower is more
    urgent. `max_delay`: an early R or a W starts only if it delays a more urgent action by at most this share of its own seconds.
    """

    in_flight: tuple[float, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    max_delay: float = 1.0


def list_schedule(
    workload: Workload, n_microbatches: int, capacity: Sequence[float], rule: PriorityRule
) -> ListSchedule | None:
    """Return the list schedule of `rule` in which device d never holds more than `capacity[d]`; None if one micro-batch on all
    stages of a device exceeds its capacity.
    """
    scheduler = _ListScheduler(workload, n_microbatches, capacity, rule)
    return scheduler.run() if scheduler.fits_one_microbatch() else None


@dataclass(slots=True)
class _Arrivals:
    """Inputs of the next actions: `missing[s][m]` transfers are not sent yet, the others arrive by `time[s][m]` seconds."""

    missing: list[list[int]]
    time: list[list[float]]

    @classmethod
    def of(cls, sent: Transfers, n_stages: int, n_microbatches: int) -> _Arrivals:
        awaited = [0] * n_stages
        for transfers in sent:
            for transfer in transfers:
                for stage in transfer.stages:
                    awaited[stage] += 1
        return cls([[count] * n_microbatches for count in awaited], [[0.0] * n_microbatches for _ in awaited])


class _ListScheduler:
    """An event loop over devices. `f`, `i`, `w`, `r` count, per stage, the micro-batches whose F, I (or B), W, R has started."""

    def __init__(self, workload: Workload, n_microbatches: int, capacity: Sequence[float], rule: PriorityRule) -> None:
        stages, devices = range(workload.n_stages), range(workload.n_devices)
        self.workload, self.m, self.rule = workload, n_microbatches, rule
        self.stages = [[s for s in stages if workload.placement[s] == d] for d in devices]
        self.seconds = {
            Kind.FORWARD: workload.forward,
            Kind.RECOMPUTE: workload.recompute,
            Kind.INPUT_GRAD: workload.input_grad,
            Kind.WEIGHT_GRAD: workload.weight_grad,
            Kind.BACKWARD: workload.backward,
        }
        self.backward_kind = Kind.INPUT_GRAD if workload.split else Kind.BACKWARD
        self._bound_memory(capacity)
        self.f, self.i, self.w, self.r = ([0 for _ in stages] for _ in range(4))
        self.inputs = _Arrivals.of(workload.forward_transfers, workload.n_stages, n_microbatches)
        self.gradients = _Arrivals.of(workload.gradient_transfers, workload.n_stages, n_microbatches)
        self.restored: list[tuple[int, int] | None] = [None for _ in devices]  # (stage, micro-batch) in the buffer
        self.is_idle = [False for _ in devices]
        self.link_free: dict[tuple[int, int], float] = {}
        self.rows: list[list[Action]] = [[] for _ in devices]
        self.events: list[tuple[float, int]] = [(0.0, d) for d in devices]

    def _bound_memory(self, capacity: Sequence[float]) -> None:
        """Set the memory of a micro-batch per stage and, per device, what is left beside the restore buffer."""
        workload, stages = self.workload, range(self.workload.n_stages)
        self.kept = [workload.recipe[s] if workload.is_recomputed[s] else workload.saved[s] for s in stages]
        self.weight_saved = [workload.weight_saved[s] if workload.split else 0.0 for s in stages]
        most = [max(pair) for pair in zip(workload.saved, workload.weight_saved, strict=True)]
        buffers = [max((most[s] for s in own if workload.is_recomputed[s]), default=0.0) for own in self.stages]
        self.capacity = [with_tolerance(whole) - buffer for whole, buffer in zip(capacity, buffers, strict=True)]
        self.one_microbatch = [sum(self.kept[s] for s in own) for own in self.stages]
        full = [sum(self.kept[s] * min(self.rule.in_flight[s], self.m) for s in own) for own in self.stages]
        self.fits_all_quotas = [whole <= most for whole, most in zip(full, self.capacity, strict=True)]

    def fits_one_microbatch(self) -> bool:
        """Return whether every device has the memory for one micro-batch on all its stages."""
        return all(one <= most for one, most in zip(self.one_microbatch, self.capacity, strict=True))

    def run(self) -> ListSchedule:
        """Process the times at which devices become free, until all actions have run."""
        last = 0.0
        while self.events:
            now, device = heappop(self.events)
            kind, stage, soonest = self._choose(device, now)
            if kind is not None:
                end = self._start(kind, stage, device, now)
                last = max(last, end)
                heappush(self.events, (end, device))
            elif soonest < inf:
                heappush(self.events, (soonest, device))
            else:
                self.is_idle[device] = True
        return ListSchedule(tuple(map(tuple, self.rows)), last)

    def _choose(self, device: int, now: float) -> tuple[Kind | None, int, float]:
        """Return (kind, stage, soonest): the action to start, or None and the time at which the next action is ready."""
        kind, stage, best, soonest = None, 0, inf, inf
        for rank, ready, candidate, s in self._options(device):
            if ready > now:
                soonest = min(soonest, ready)
            elif rank < best:
                kind, stage, best = candidate, s, rank
        if kind is not None and best >= _FILLER:
            seconds = self.seconds[kind][stage]
            if now + seconds - soonest > self.rule.max_delay * seconds:
                kind = None
        return kind, stage, soonest

    def _options(self, device: int) -> list[tuple[float, float, Kind, int]]:
        """Return (rank, ready time, kind, stage) of the actions that memory and known inputs permit next."""
        options: list[tuple[float, float, Kind, int]] = []
        rule, is_buffer_full = self.rule, self.restored[device] is not None
        for s in self.stages[device]:
            i, f = self.i[s], self.f[s]
            if i < f:
                needs_restore = self.workload.is_recomputed[s] and self.r[s] == i
                if needs_restore and not is_buffer_full and s == self._next_restored(device):
                    options.append((_FILLER, 0.0, Kind.RECOMPUTE, s))
                if not self.gradients.missing[s][i] and not (needs_restore and is_buffer_full):
                    kind = Kind.RECOMPUTE if needs_restore else self.backward_kind
                    options.append((rule.backward[s], self.gradients.time[s][i], kind, s))
            if f < self.m and f - i < rule.in_flight[s] and not self.inputs.missing[s][f] and self._fits(device, s):
                options.append((rule.forward[s], self.inputs.time[s][f], Kind.FORWARD, s))
            if self.w[s] < i:
                options.append((_FILLER + 1 + self.w[s], 0.0, Kind.WEIGHT_GRAD, s))
        return options

    def _next_restored(self, device: int) -> int:
        """Return the stage whose early R may start: the first if micro-batches finish one after another. An early R of another
        stage could fill the buffer that this stage needs.
        """
        stages = (s for s in self.stages[device] if self.workload.is_recomputed[s] and self.i[s] < self.m)
        return min(stages, key=lambda s: (self.i[s], -s))

    def _fits(self, device: int, stage: int) -> bool:
        """Return whether the next forward of `stage` fits, and after it the missing forwards of older micro-batches, oldest
        first, each of which returns its memory when it finishes.
        """
        own, kept = self.stages[device], self.kept
        left = self.capacity[device] - self._held(device) - kept[stage]
        if left < 0 or len(own) == 1 or self.fits_all_quotas[device] or left >= self.one_microbatch[device]:
            return left >= 0
        begun = {s: self.f[s] + (s == stage) for s in own}
        for m in range(min(self.w[s] for s in own), max(begun.values()) + 1):
            if sum(kept[s] for s in own if begun[s] <= m) > left:
                return False
            left += sum(self._held_by(s, m, device) for s in own if self.w[s] <= m < begun[s])
            if left >= self.one_microbatch[device]:
                break
        return True

    def _held(self, device: int) -> float:
        """Return the memory of all micro-batches in flight outside the restore buffer.

        The sum comes from counts at each call, so that rounding errors do not add up.
        """
        held = 0.0
        for s in self.stages[device]:
            held += self.kept[s] * (self.f[s] - self.i[s]) + self.weight_saved[s] * (self.i[s] - self.w[s])
        restored = self.restored[device]
        return held if restored is None or self.i[restored[0]] <= restored[1] else held - self.weight_saved[restored[0]]

    def _held_by(self, s: int, m: int, device: int) -> float:
        """Return the memory of micro-batch m on stage s outside the restore buffer."""
        return self.kept[s] if self.i[s] <= m else 0.0 if self.restored[device] == (s, m) else self.weight_saved[s]

    def _start(self, kind: Kind, s: int, device: int, now: float) -> float:
        """Append the action to its row, send its transfers, and return its end in seconds."""
        end = now + self.seconds[kind][s]
        if kind is Kind.FORWARD:
            m, self.f[s] = self.f[s], self.f[s] + 1
            self._send(self.workload.forward_transfers[s], m, device, end, self.inputs)
        elif kind is Kind.WEIGHT_GRAD:
            m, self.w[s] = self.w[s], self.w[s] + 1
            self._empty_buffer(s, m, device)
        elif kind is Kind.RECOMPUTE:
            m, self.r[s] = self.r[s], self.r[s] + 1
            self.restored[device] = s, m
        else:
            m, self.i[s] = self.i[s], self.i[s] + 1
            self._end_backward(s, m, device)
            self._send(self.workload.gradient_transfers[s], m, device, end, self.gradients)
        self.rows[device].append(Action(s, kind, m))
        return end

    def _end_backward(self, s: int, m: int, device: int) -> None:
        """Empty the restore buffer if what W needs fits outside; else it stays in the buffer until W."""
        self.w[s] += not self.workload.split
        if self._held(device) + self.weight_saved[s] <= self.capacity[device]:
            self._empty_buffer(s, m, device)

    def _empty_buffer(self, s: int, m: int, device: int) -> None:
        """Empty the restore buffer if it holds micro-batch m of stage s."""
        if self.restored[device] == (s, m):
            self.restored[device] = None

    def _send(self, transfers: Sequence[Transfer], m: int, device: int, time: float, arrivals: _Arrivals) -> None:
        """Queue the transfers on their links at `time`, record their arrival, and wake idle receivers."""
        for transfer in transfers:
            arrival = time
            if transfer.seconds:
                link = device, transfer.device
                arrival = self.link_free[link] = max(time, self.link_free.get(link, 0.0)) + transfer.seconds
            for stage in transfer.stages:
                arrivals.missing[stage][m] -= 1
                arrivals.time[stage][m] = max(arrivals.time[stage][m], arrival)
            if self.is_idle[transfer.device]:
                self.is_idle[transfer.device] = False
                heappush(self.events, (arrival, transfer.device))
