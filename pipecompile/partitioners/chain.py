"""The exact cut of a linear order into intervals: stage s takes the positions [i, j), any of them possibly empty.

    best[s][j] = min over i <= j of max(best[s - 1][i], load_s(i, j))

With compute alone, best[s - 1] rises and load_s falls with i, so each minimum sits at their crossing and is found by
bisection: O(K n log n), Pinar and Aykanat, "Fast optimal load balancing algorithms for 1D partitioning", 2004. With
tensors neither holds, and all i are looked at, one column j at a time: O(K n^2 + tensors), O(n K) memory.

What an interval sends and receives is a sum of rectangles in the (i, j) plane. A tensor from p to q1 < p < q2:

    sent      i <= p < j  and  (i > q1  or  j <= q2)          received      q in [i, j) for a q, p not in [i, j)

Exact for multicast. Without it a tensor with many consumers is charged per side (before, after) to its sender, the least
it can cost: the result is then re-evaluated by the caller.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pipecompile.partitioners.clusters import Clusters, Flow, Stages
from pipecompile.partitioners.loads import TOLERANCE

__all__ = ["cut"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Rectangle = tuple[int, int, int, int, float]
"""Adds the last number where `i0 <= i < i1` and `j0 <= j < j1`."""


def cut(clusters: Clusters, stages: Stages, order: Sequence[int]) -> list[int] | None:
    """The stage of every cluster under the best cut of this order, or None when no cut of it fits in memory."""
    first = np.array([_first_fit(clusters, order, stages.in_flight[s], stages.limit[s]) for s in range(len(stages))])
    work = _prefix(clusters.time, order)
    if clusters.flows:
        start = _cut_by_column(stages, work, first, _columns(clusters, stages, order))
    else:
        start = _cut_by_crossing(stages, work, first)
    if start is None:
        return None
    stage = [0] * len(order)
    end = len(order)
    for s in reversed(range(len(stages))):
        begin = int(start[s, end])
        for position in range(begin, end):
            stage[order[position]] = s
        end = begin
    return stage


def _prefix(column: Sequence[float], order: Sequence[int]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.asarray(column, dtype=np.float64)[np.asarray(order, dtype=np.int64)])])


def _first_fit(clusters: Clusters, order: Sequence[int], in_flight: float, limit: float) -> Ints:
    """For every end j the least start i such that [i, j) fits."""
    held = _prefix(clusters.bytes, order) + in_flight * _prefix(clusters.activation, order)
    slack = limit * (1 + TOLERANCE)
    if not np.isfinite(slack):
        return np.zeros(len(held), dtype=np.int64)
    return np.minimum(np.searchsorted(held, held - slack, side="left"), np.arange(len(held)))


def _cut_by_crossing(stages: Stages, work: Floats, first: Ints) -> Ints | None:
    n = len(work) - 1
    start = np.zeros((len(stages), n + 1), dtype=np.int64)
    ends = np.arange(n + 1)
    best = np.where(ends == 0, 0.0, np.inf)
    for s, speed in enumerate(stages.speed):
        low, high = first[s].copy(), ends.copy()  # the least i with best[i] >= load(i, j) lies in [low, high]
        while np.any(low < high):
            middle = (low + high) // 2
            crossed = best[middle] >= (work - work[middle]) / speed
            high = np.where(crossed, middle, high)
            low = np.where(crossed, low, np.minimum(middle + 1, high))
        before = np.maximum(low - 1, first[s])
        at, at_before = (np.maximum(best[i], (work - work[i]) / speed) for i in (low, before))
        start[s] = np.where(at_before < at, before, low)
        best = np.minimum(at, at_before)
    return start if np.isfinite(best[n]) else None


def _cut_by_column(stages: Stages, work: Floats, first: Ints, columns: Iterable[tuple[Floats, Floats]]) -> Ints | None:
    n, k = len(work) - 1, len(stages)
    best = np.full((k + 1, n + 1), np.inf)  # row s + 1 is stage s; row 0 is what lies before stage 0
    best[0, 0] = best[1:, 0] = 0.0
    start = np.zeros((k, n + 1), dtype=np.int64)
    speed = np.array(stages.speed)[:, None]
    if uniform := len(set(stages.speed)) == 1:
        speed = speed[:1]
    bounded = bool(first.any())
    for j, (sent, received) in enumerate(columns, start=1):
        compute = (work[j] - work[:j]) / speed
        load = np.maximum(compute, np.maximum(sent, received)) if stages.overlap else compute + (sent + received)
        value = np.maximum(best[:k, :j], load[:1] if uniform else load)
        if bounded:
            value[np.arange(j) < first[:, j, None]] = np.inf
        choice = value.argmin(axis=1)
        for s in range(k):
            found = value[s, choice[s]]
            if best[s, j] <= found:  # an empty stage is as good
                best[s + 1, j], start[s, j] = best[s, j], j
            else:
                best[s + 1, j], start[s, j] = found, choice[s]
    return start if np.isfinite(best[k, n]) else None


def _columns(clusters: Clusters, stages: Stages, order: Sequence[int]) -> Iterator[tuple[Floats, Floats]]:
    """For j = 1, 2, ... what each interval [i, j), i < j, sends and receives."""
    n = len(order)
    position = {cluster: p for p, cluster in enumerate(order)}
    moved = [(position[flow.source], sorted(position[c] for c in flow.consumers), flow) for flow in clusters.flows]
    sent = _swept((r for p, q, flow in moved for r in _sent(p, q, flow, n, stages.multicast)), n)
    received = _swept((r for p, q, flow in moved for r in _received(p, q, flow, n)), n)
    return zip(sent, received, strict=True)


def _sent(p: int, q: Sequence[int], flow: Flow, n: int, multicast: bool) -> Iterator[Rectangle]:
    if q[0] < p:
        yield q[0] + 1, p + 1, p + 1, n + 1, flow.time
    if q[-1] > p:
        yield 0, p + 1, p + 1, q[-1] + 1, flow.time
    if multicast and q[0] < p < q[-1]:
        yield q[0] + 1, p + 1, p + 1, q[-1] + 1, -flow.time


def _received(p: int, q: Sequence[int], flow: Flow, n: int) -> Iterator[Rectangle]:
    """Below the source a tensor is booked under the last consumer inside, above it under the first."""
    middle = bisect_left(q, p)
    for here, after in zip(q[:middle], [*q[:middle], p][1:], strict=True):
        yield 0, here + 1, here + 1, after + 1, flow.time
    for here, before in zip(q[middle:], [p, *q[middle:]][:-1], strict=True):
        yield before + 1, here + 1, here + 1, n + 1, flow.time


def _swept(rectangles: Iterator[Rectangle], n: int) -> Iterator[Floats]:
    """The sum of rectangles, column by column: second differences, summed along both axes."""
    corners = [c for i0, i1, j0, j1, t in rectangles for c in ((j0, i0, t), (j0, i1, -t), (j1, i0, -t), (j1, i1, t))]
    table = np.array(sorted(corners), dtype=np.float64).reshape(-1, 3)
    bounds = np.searchsorted(table[:, 0], np.arange(n + 2))
    rows = table[:, 1].astype(np.int64)
    difference = np.zeros(n + 2)
    for j in range(1, n + 1):
        inside = slice(bounds[j], bounds[j + 1])
        np.add.at(difference, rows[inside], table[inside, 2])
        yield np.cumsum(difference[:j])
