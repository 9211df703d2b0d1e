"""List scheduling: whenever a device is free it starts the most urgent action that it may.

    F, I, B    in the order of a taste: somebody waits for them, and a forward needs room for what it saves
    R          early, when there is nothing else: the forward once more, for the backward that comes next
    W          last: nobody waits for it, it fills the time

Micro-batches go through every stage in ascending order. What a device holds is bounded in bytes (or any other unit), and
each stage can be bounded by itself: how many of its forwards may wait for their backward.

Stages that are recomputed have a bench on their device, room for what the largest of them saves: one micro-batch at a
time is brought back there. A forward is not started when the room that it leaves could not take the oldest micro-batches
to their end, one after another, as a banker keeps what the first customers may still ask for. So something can always go
on. O(n log n) for n actions, times the stages of a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from pipecompile.ir import Action, Kind
from pipecompile.schedules.search.workload import Parcel, Work, within

__all__ = ["Listed", "Taste", "list_schedule"]


@dataclass(frozen=True, slots=True)
class Listed:
    """The rows of a schedule, and the seconds that it takes."""

    rows: tuple[tuple[Action, ...], ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Taste:
    """What a list schedule may choose freely.

    `in_flight[s]`: how many forwards of stage s may wait for their backward. `forward[s]`, `backward[s]`: the lower, the
    more urgent. `patience`: a W or an early R does not begin when somebody would wait for more than this share of it.
    """

    in_flight: tuple[float, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    patience: float = 1.0


def list_schedule(work: Work, n_microbatches: int, room: Sequence[float], taste: Taste) -> Listed | None:
    """A schedule in which device d never holds more than `room[d]`; None when one micro-batch is too much."""
    desk = _Desk(work, n_microbatches, room, taste)
    return desk.run() if desk.is_possible() else None


class _Desk:
    """The state of a run: how far each kind came on each stage, and when what the next cells wait for is there."""

    def __init__(self, work: Work, n_microbatches: int, room: Sequence[float], taste: Taste) -> None:
        stages, devices = range(work.n_stages), range(work.n_devices)
        self.work, self.m, self.taste = work, n_microbatches, taste
        self.stages = [[s for s in stages if work.placement[s] == d] for d in devices]
        self.keeps = [work.kept[s] if work.again[s] else work.saved[s] for s in stages]
        most = [max(pair) for pair in zip(work.saved, work.weight_saved, strict=True)]
        bench = [max((most[s] for s in own if work.again[s]), default=0.0) for own in self.stages]
        self.room = [within(whole) - top for whole, top in zip(room, bench, strict=True)]
        self.seconds = {
            Kind.FORWARD: work.forward,
            Kind.RECOMPUTE: work.recompute,
            Kind.INPUT_GRAD: work.input_grad,
            Kind.WEIGHT_GRAD: work.weight_grad,
            Kind.BACKWARD: work.backward,
        }
        self.back = Kind.INPUT_GRAD if work.split else Kind.BACKWARD
        self.whole = [sum(self.keeps[s] for s in own) for own in self.stages]
        full = [sum(self.keeps[s] * min(taste.in_flight[s], n_microbatches) for s in own) for own in self.stages]
        self.is_safe = [whole <= room for whole, room in zip(full, self.room, strict=True)]
        self.waste = [work.weight_saved[s] if work.split else 0.0 for s in stages]
        self.f, self.i, self.w, self.r = ([0 for _ in stages] for _ in range(4))
        self.f_missing, self.f_at = self._waits(work.ahead)
        self.i_missing, self.i_at = self._waits(work.back)
        self.bench: list[tuple[int, int] | None] = [None for _ in devices]
        self.is_idle = [False for _ in devices]
        self.links: dict[tuple[int, int], float] = {}
        self.rows: list[list[Action]] = [[] for _ in devices]
        self.events: list[tuple[float, int]] = [(0.0, d) for d in devices]

    def _waits(self, sent: Sequence[Sequence[Parcel]]) -> tuple[list[list[int]], list[list[float]]]:
        """Per stage and micro-batch how many parcels have not been sent yet, and when the last of the others arrives."""
        awaited = [0] * self.work.n_stages
        for parcels in sent:
            for parcel in parcels:
                for stage in parcel.stages:
                    awaited[stage] += 1
        return [[count] * self.m for count in awaited], [[0.0] * self.m for _ in awaited]

    def is_possible(self) -> bool:
        """Can every device take one micro-batch?"""
        return all(whole <= room for whole, room in zip(self.whole, self.room, strict=True))

    def run(self) -> Listed:
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
        return Listed(tuple(map(tuple, self.rows)), last)

    def _choose(self, device: int, now: float) -> tuple[Kind | None, int, float]:
        """The action to start, or none and when there may be one."""
        kind, stage, best, soonest = None, 0, inf, inf
        for rank, at, candidate, s in self._options(device):
            if at > now:
                soonest = min(soonest, at)
            elif rank < best:
                kind, stage, best = candidate, s, rank
        if kind is not None and best >= FILLER:
            seconds = self.seconds[kind][stage]
            if now + seconds - soonest > self.taste.patience * seconds:
                kind = None
        return kind, stage, soonest

    def _options(self, device: int) -> list[tuple[float, float, Kind, int]]:
        """What may come next: (rank, time from which on it is possible, kind, stage)."""
        found: list[tuple[float, float, Kind, int]] = []
        taste, waits = self.taste, self.bench[device] is not None
        for s in self.stages[device]:
            i, f = self.i[s], self.f[s]
            if i < f:
                bare = self.work.again[s] and self.r[s] == i  # nothing is restored yet
                if bare and not waits and s == self._next_restored(device):
                    found.append((FILLER, 0.0, Kind.RECOMPUTE, s))
                if not self.i_missing[s][i] and not (bare and waits):
                    found.append((taste.backward[s], self.i_at[s][i], Kind.RECOMPUTE if bare else self.back, s))
            if f < self.m and f - i < taste.in_flight[s] and not self.f_missing[s][f] and self._fits(device, s):
                found.append((taste.forward[s], self.f_at[s][f], Kind.FORWARD, s))
            if self.w[s] < i:
                found.append((FILLER + 1 + self.w[s], 0.0, Kind.WEIGHT_GRAD, s))
        return found

    def _next_restored(self, device: int) -> int:
        """The stage whose R comes first when micro-batches end one after another: an early R of another could lock it out."""
        again = (s for s in self.stages[device] if self.work.again[s] and self.i[s] < self.m)
        return min(again, key=lambda s: (self.i[s], -s))

    def _fits(self, device: int, stage: int) -> bool:
        """Is there room for the next forward of `stage`, and after it for the forwards that older micro-batches lack?"""
        own, keeps = self.stages[device], self.keeps
        left = self.room[device] - self._held(device) - keeps[stage]
        if left < 0 or len(own) == 1 or self.is_safe[device] or left >= self.whole[device]:
            return left >= 0
        begun = {s: self.f[s] + (s == stage) for s in own}
        for m in range(min(self.w[s] for s in own), max(begun.values()) + 1):
            if sum(keeps[s] for s in own if begun[s] <= m) > left:
                return False
            left += sum(self._holds(s, m, device) for s in own if self.w[s] <= m < begun[s])
            if left >= self.whole[device]:
                break
        return True

    def _held(self, device: int) -> float:
        """What all micro-batches under way take, beside the bench. From counts, so that rounding does not add up."""
        held = 0.0
        for s in self.stages[device]:
            held += self.keeps[s] * (self.f[s] - self.i[s]) + self.waste[s] * (self.i[s] - self.w[s])
        bench = self.bench[device]
        return held if bench is None or self.i[bench[0]] <= bench[1] else held - self.waste[bench[0]]

    def _holds(self, s: int, m: int, device: int) -> float:
        """What a micro-batch under way takes, beside the bench."""
        return self.keeps[s] if self.i[s] <= m else 0.0 if self.bench[device] == (s, m) else self.waste[s]

    def _start(self, kind: Kind, s: int, device: int, now: float) -> float:
        """Carry it out, and tell those who wait for it. Returns when it ends."""
        end = now + self.seconds[kind][s]
        if kind is Kind.FORWARD:
            m, self.f[s] = self.f[s], self.f[s] + 1
            self._send(self.work.ahead[s], m, device, end, self.f_missing, self.f_at)
        elif kind is Kind.WEIGHT_GRAD:
            m, self.w[s] = self.w[s], self.w[s] + 1
            self._leave_bench(s, m, device)
        elif kind is Kind.RECOMPUTE:
            m, self.r[s] = self.r[s], self.r[s] + 1
            self.bench[device] = s, m
        else:
            m, self.i[s] = self.i[s], self.i[s] + 1
            self._end_backward(s, m, device)
            self._send(self.work.back[s], m, device, end, self.i_missing, self.i_at)
        self.rows[device].append(Action(s, kind, m))
        return end

    def _end_backward(self, s: int, m: int, device: int) -> None:
        """What W needs stays. Of a recomputed stage it stays on the bench, where R put it, if there is no room elsewhere."""
        self.w[s] += not self.work.split
        if self._held(device) + self.waste[s] <= self.room[device]:
            self._leave_bench(s, m, device)

    def _leave_bench(self, s: int, m: int, device: int) -> None:
        """If it is there."""
        if self.bench[device] == (s, m):
            self.bench[device] = None

    def _send(
        self,
        parcels: Sequence[Parcel],
        m: int,
        device: int,
        time: float,
        missing: list[list[int]],
        at: list[list[float]],
    ) -> None:
        for parcel in parcels:
            arrival = time
            if parcel.seconds:
                link = device, parcel.device
                arrival = self.links[link] = max(time, self.links.get(link, 0.0)) + parcel.seconds
            for stage in parcel.stages:
                missing[stage][m] -= 1
                at[stage][m] = max(at[stage][m], arrival)
            if self.is_idle[parcel.device]:
                self.is_idle[parcel.device] = False
                heappush(self.events, (arrival, parcel.device))


FILLER = 1e9
"""The rank from which on an action only fills the time. Oldest W first."""
