"""Cut a linear order into intervals, optimally: stage s takes the positions [i, j), any of them possibly empty.

    best[s][j] = min over i <= j of max(best[s - 1][i], load_s(i, j))

With compute alone, best[s - 1] rises and load_s falls with i, so each minimum is at their crossing, which bisection finds:
O(K n log n), Pinar and Aykanat, "Fast optimal load balancing algorithms for 1D partitioning", 2004. With tensors, neither is
monotone. Then every i is tried that leaves a stage below a cap, one column j at a time: O(K n^2 + tensors) without a cap,
O(n K) memory.

Exact if every stage is a device of its own, all links are alike, and multicast holds or each tensor has one consumer.
Otherwise the loads are estimates (stages share their device evenly, all links are alike), and the caller evaluates the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from pipecompile.partitioners.clusters import Clusters
from pipecompile.partitioners.constraints import StageRanges
from pipecompile.partitioners.dp.interval_traffic import IntervalColumn, interval_columns
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import TOLERANCE

__all__ = ["Floats", "OrderProgram", "cut_order"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _PrefixSums:
    """A linear order as cumulative sums (positions + 1), and the machine as columns (stages, 1), one row if all are alike.

    `recompute` is 1 for a stage that recomputes, 0 for a stage that does not, -1 if the solver decides.
    """

    time: Floats
    forward: Floats
    bytes: Floats
    activation: Floats
    speed: Floats
    memory_limit: Floats
    in_flight: Floats
    recompute: Floats
    overlap: bool
    has_memory_limit: bool


def cut_order(
    clusters: Clusters,
    machine: Machine,
    order: Sequence[int],
    ranges: StageRanges | None = None,
    cap: float = inf,
    copies: Sequence[int] | None = None,
) -> list[int] | None:
    """Return the stage of every cluster under the best cut of an order; None if no cut of the order fits in memory, lies
    within the stage ranges and has a bottleneck of at most `cap`. `copies` is an estimate, per flow, of the stages that receive it.
    """
    sums = _prefix_sums(clusters, machine, order)
    ends = _end_bounds(order, ranges, len(machine))
    if ends is None:
        return None
    low = _least_starts(clusters, machine, sums, order, cap)
    if ranges is None and not clusters.flows and not clusters.shared and not sums.recompute.any():
        start = _cut_by_bisection(sums, len(machine), low)
    else:
        columns = interval_columns(clusters, order, low.tolist(), multicast=machine.multicast, copies=copies)
        best, starts = _cut_by_columns(sums, len(machine), low, ends, columns)
        start = starts if np.isfinite(best[-1, -1]) else None
    if start is None:
        return None
    assignment = [0] * len(order)
    end = len(order)
    for s in reversed(range(len(machine))):
        begin = int(start[s, end])
        for position in range(begin, end):
            assignment[order[position]] = s
        end = begin
    return assignment


@dataclass(frozen=True, slots=True)
class OrderProgram:
    """The program of an order with tensors, solved forwards under a cap. `low` has the least start per end, and `best[s, j]` the least
    bottleneck of the first s stages if they end at j, with every tensor sent once to each side; infinite if none fits.
    """

    low: Ints
    best: Floats
    _sums: _PrefixSums
    _ends: tuple[list[int], list[int]]
    _columns: list[IntervalColumn]

    @classmethod
    def of(
        cls, clusters: Clusters, machine: Machine, order: Sequence[int], ranges: StageRanges | None, cap: float
    ) -> OrderProgram | None:
        """Return the program; None if the order violates the stage ranges."""
        sums, ends = _prefix_sums(clusters, machine, order), _end_bounds(order, ranges, len(machine))
        if ends is None:
            return None
        low = _least_starts(clusters, machine, sums, order, cap)
        columns = list(interval_columns(clusters, order, low.tolist(), multicast=machine.multicast))
        return cls(low, _cut_by_columns(sums, len(machine), low, ends, columns)[0], sums, ends, columns)

    def may_end(self, s: int, j: int) -> bool:
        """Return whether the stage ranges let stage s end at j."""
        return self._ends[0][s] <= j <= self._ends[1][s]

    def loads(self, s: int, j: int, extra: Floats) -> Floats:
        """Return the load of stage s, per start from `low[j]` to j - 1, if it sends for `extra` seconds more."""
        sent, received, inbox, shared = self._columns[j - 1]
        column = sent + extra, received, inbox, shared
        rows = _loads(self._sums, slice(int(self.low[j]), j), j, column)
        loads: Floats = rows[min(s, len(rows) - 1)]
        return loads


def _prefix_sums(clusters: Clusters, machine: Machine, order: Sequence[int]) -> _PrefixSums:
    indices = np.asarray(order, dtype=np.int64)

    def cumulated(column: Sequence[float]) -> Floats:
        return np.concatenate([[0.0], np.cumsum(np.asarray(column, dtype=np.float64)[indices])])

    device = np.array(machine.device_of)
    share = 1.0 / np.bincount(device)[device]
    speed, limit = np.array(machine.speed)[device] * share, np.array(machine.memory_limit)[device] * share
    in_flight = np.array(machine.in_flight)
    recompute = np.array([-1.0 if choice is None else float(choice) for choice in machine.recompute])
    alike = all(len(set(row)) == 1 for row in (speed, limit, in_flight, recompute))
    rows = slice(0, 1) if alike else slice(None)
    return _PrefixSums(
        time=cumulated(clusters.time),
        forward=cumulated(clusters.forward),
        bytes=cumulated(clusters.bytes),
        activation=cumulated(clusters.activation),
        speed=speed[rows, None],
        memory_limit=limit[rows, None],
        in_flight=in_flight[rows, None],
        recompute=recompute[rows, None],
        overlap=machine.overlap,
        has_memory_limit=machine.has_memory_limit,
    )


def _end_bounds(order: Sequence[int], ranges: StageRanges | None, n_stages: int) -> tuple[list[int], list[int]] | None:
    """Return, per stage, the least and the largest position at which it may end; None if the order violates the ranges."""
    n = len(order)
    least, most = [0] * (n_stages - 1) + [n], [n] * n_stages
    if ranges is None:
        return least, most
    for position, cluster in enumerate(order):
        earliest, latest = ranges[0][cluster], ranges[1][cluster]
        for s in range(max(latest, 0), n_stages - 1):
            least[s] = position + 1
        for s in range(min(earliest, n_stages)):
            most[s] = min(most[s], position)
    return (least, most) if all(a <= b for a, b in zip(least, most, strict=True)) else None


def _least_starts(clusters: Clusters, machine: Machine, sums: _PrefixSums, order: Sequence[int], cap: float) -> Ints:
    """Return, per end j, the least start i such that some stage can hold [i, j) within the cap, memory and pairs apart."""
    ends = np.arange(len(sums.time))
    low = np.zeros(len(ends), dtype=np.int64)
    if cap < inf:
        capacity = cap * sums.speed.max() * (1 + TOLERANCE)
        low = np.maximum(low, np.minimum(np.searchsorted(sums.time, sums.time - capacity), ends))
    if machine.has_memory_limit and (capacity := sums.memory_limit.max() * (1 + TOLERANCE)) < inf:
        memory = sums.bytes + machine.min_in_flight * sums.activation
        low = np.maximum(low, np.minimum(np.searchsorted(memory, memory - capacity), ends))
    position = {cluster: p for p, cluster in enumerate(order)}
    for a, b in clusters.strict_arcs:
        low[position[b] + 1] = max(low[position[b] + 1], position[a] + 1)
    return np.maximum.accumulate(low)


# -- compute alone ----------------------------------------------------------------------------------------------------


def _cut_by_bisection(sums: _PrefixSums, k: int, low: Ints) -> Ints | None:
    """Return start[s, j], the best start of stage s if it ends at j; None if no cut fits."""
    n, work = len(sums.time) - 1, sums.time
    start = np.zeros((k, n + 1), dtype=np.int64)
    ends = np.arange(n + 1)
    best = np.where(ends == 0, 0.0, np.inf)
    for s in range(k):
        row = min(s, len(sums.speed) - 1)
        speed, first = sums.speed[row, 0], np.maximum(low, _first_fit(sums, row))
        left, right = first.copy(), ends.copy()  # the least i with best[i] >= load(i, j) lies in [left, right]
        while np.any(left < right):
            middle = (left + right) // 2
            crossed = best[middle] >= (work - work[middle]) / speed
            right = np.where(crossed, middle, right)
            left = np.where(crossed, left, np.minimum(middle + 1, right))
        before = np.maximum(left - 1, first)
        at, at_before = (np.maximum(best[i], (work - work[i]) / speed) for i in (left, before))
        start[s] = np.where(at_before < at, before, left)
        best = np.minimum(at, at_before)
    return start if np.isfinite(best[n]) else None


def _first_fit(sums: _PrefixSums, row: int) -> Ints:
    """Return, per end j, the least start i such that [i, j) fits in the memory of a stage that does not recompute."""
    memory = sums.bytes + sums.in_flight[row] * sums.activation
    capacity = sums.memory_limit[row, 0] * (1 + TOLERANCE)
    if not np.isfinite(capacity):
        return np.zeros(len(memory), dtype=np.int64)
    first: Ints = np.minimum(np.searchsorted(memory, memory - capacity), np.arange(len(memory)))
    return first


# -- with tensors -----------------------------------------------------------------------------------------------------


def _cut_by_columns(
    sums: _PrefixSums, k: int, low: Ints, ends: tuple[list[int], list[int]], columns: Iterable[IntervalColumn]
) -> tuple[Floats, Ints]:
    """Return best[s, j], the least bottleneck of the first s stages if they end at j (infinite if none fits), and start[s, j], the
    best start of stage s if it ends at j.
    """
    n = len(sums.time) - 1
    best = np.full((k + 1, n + 1), np.inf)  # row s + 1 is stage s; row 0 is what lies before stage 0
    best[0, 0] = 0.0
    best[1:, 0] = [np.inf if least else 0.0 for least in ends[0]]
    start = np.zeros((k, n + 1), dtype=np.int64)
    for j, column in enumerate(columns, start=1):
        starts = slice(int(low[j]), j)
        value = np.maximum(best[:k, starts], _loads(sums, starts, j, column))
        choice = value.argmin(axis=1) if j > starts.start else None
        for s in range(k):
            if not ends[0][s] <= j <= ends[1][s]:
                continue
            least = value[s, choice[s]] if choice is not None else inf
            if best[s, j] <= least:  # an empty stage is as good
                best[s + 1, j], start[s, j] = best[s, j], j
            elif choice is not None:
                best[s + 1, j], start[s, j] = least, starts.start + choice[s]
    return best, start


def _loads(sums: _PrefixSums, starts: slice, j: int, column: IntervalColumn) -> Floats:
    """Return the load (stages, starts) of [i, j), with recomputation only if needed; infinite if [i, j) does not fit."""
    sent, received, inbox, shared = column
    work, forward = sums.time[j] - sums.time[starts], sums.forward[j] - sums.forward[starts]
    once = _load(work / sums.speed, sent, received, overlap=sums.overlap)
    twice = once
    if sums.recompute.any():
        twice = _load((work + forward) / sums.speed, sent, received, overlap=sums.overlap)
    if not sums.has_memory_limit:
        return np.where(sums.recompute > 0, twice, once)
    limit, activation = sums.memory_limit * (1 + TOLERANCE), sums.activation[j] - sums.activation[starts]
    other = sums.bytes[j] - sums.bytes[starts] + shared + sums.in_flight * inbox
    fits_once = (sums.recompute <= 0) & (other + sums.in_flight * activation <= limit)
    fits_twice = (sums.recompute != 0) & (other + activation <= limit)
    return np.where(fits_once, once, np.where(fits_twice, twice, np.inf))


def _load(compute: Floats, sent: Floats, received: Floats, *, overlap: bool) -> Floats:
    if overlap:
        return np.maximum(compute, np.maximum(sent, received))
    return compute + (sent + received)
