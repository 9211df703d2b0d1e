"""The exact cut of a linear order into intervals: stage s takes the positions [i, j), any of them possibly empty.

    best[s][j] = min over i <= j of max(best[s - 1][i], load_s(i, j))

With compute alone, best[s - 1] rises and load_s falls with i, so each minimum sits at their crossing and is found by
bisection: O(K n log n), Pinar and Aykanat, "Fast optimal load balancing algorithms for 1D partitioning", 2004. With
tensors neither holds, and all i are looked at that leave a stage below a cap, one column j at a time: O(K n^2 + tensors)
without a cap, O(n K) memory.

Exact for stages that are devices of their own, with like links, and multicast or one consumer per tensor. Elsewhere loads
are estimates (a device shared evenly by its stages, links as if all were alike), and the caller evaluates the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from pipecompile.partitioners.clusters import Clusters
from pipecompile.partitioners.constraints import Span
from pipecompile.partitioners.dp.interval_traffic import Column, columns
from pipecompile.partitioners.machine import Stages
from pipecompile.partitioners.objective import TOLERANCE

__all__ = ["cut"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Line:
    """An order, as sums over its first positions, and what stages can do: a row per stage, or one when they are alike.
    `asked` is 1 for a stage that recomputes, 0 for one that does not, -1 for one that may.
    """

    time: Floats
    forward: Floats
    bytes: Floats
    activation: Floats
    speed: Floats
    limit: Floats
    in_flight: Floats
    asked: Floats
    overlap: bool
    bounded: bool


def cut(
    clusters: Clusters, stages: Stages, order: Sequence[int], span: Span | None = None, cap: float = inf
) -> list[int] | None:
    """The stage of every cluster under the best cut of this order, or None when no cut of it fits in memory, agrees with
    the steering, and stays within the cap.
    """
    line = _line(clusters, stages, order)
    ends = _ends(order, span, len(stages))
    if ends is None:
        return None
    low = _low(clusters, stages, line, order, cap)
    if span is None and not clusters.flows and not clusters.shared and not line.asked.any():
        start = _cut_by_crossing(line, len(stages), low)
    else:
        swept = columns(clusters, order, low.tolist(), multicast=stages.multicast)
        start = _cut_by_column(line, len(stages), low, ends, swept)
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


def _line(clusters: Clusters, stages: Stages, order: Sequence[int]) -> _Line:
    where = np.asarray(order, dtype=np.int64)

    def summed(column: Sequence[float]) -> Floats:
        return np.concatenate([[0.0], np.cumsum(np.asarray(column, dtype=np.float64)[where])])

    device = np.array(stages.device)
    share = 1.0 / np.bincount(device)[device]
    asked = np.array([-1.0 if redone is None else float(redone) for redone in stages.recompute])
    speed, limit, flying = (
        np.array(stages.speed)[device] * share,
        np.array(stages.limit)[device] * share,
        np.array(stages.in_flight),
    )
    few = slice(0, 1) if all(len(set(row)) == 1 for row in (speed, limit, flying, asked)) else slice(None)
    return _Line(
        time=summed(clusters.time),
        forward=summed(clusters.forward),
        bytes=summed(clusters.bytes),
        activation=summed(clusters.activation),
        speed=speed[few, None],
        limit=limit[few, None],
        in_flight=flying[few, None],
        asked=asked[few, None],
        overlap=stages.overlap,
        bounded=stages.bounded,
    )


def _ends(order: Sequence[int], span: Span | None, n_stages: int) -> tuple[list[int], list[int]] | None:
    """For every stage the least and the most positions that lie up to its end; None when the order is against the span."""
    n = len(order)
    least, most = [0] * (n_stages - 1) + [n], [n] * n_stages
    if span is None:
        return least, most
    for position, cluster in enumerate(order):
        first, last = span[0][cluster], span[1][cluster]
        for s in range(max(last, 0), n_stages - 1):
            least[s] = position + 1
        for s in range(min(first, n_stages)):
            most[s] = min(most[s], position)
    return (least, most) if all(a <= b for a, b in zip(least, most, strict=True)) else None


def _low(clusters: Clusters, stages: Stages, line: _Line, order: Sequence[int], cap: float) -> Ints:
    """For every end j the least start i such that [i, j) can be one stage, whichever it is."""
    ends = np.arange(len(line.time))
    low = np.zeros(len(ends), dtype=np.int64)
    if cap < inf:
        room = cap * line.speed.max() * (1 + TOLERANCE)
        low = np.maximum(low, np.minimum(np.searchsorted(line.time, line.time - room), ends))
    if stages.bounded and (room := line.limit.max() * (1 + TOLERANCE)) < inf:
        held = line.bytes + stages.least_flying * line.activation
        low = np.maximum(low, np.minimum(np.searchsorted(held, held - room), ends))
    position = {cluster: p for p, cluster in enumerate(order)}
    for a, b in clusters.strict:
        low[position[b] + 1] = max(low[position[b] + 1], position[a] + 1)
    return np.maximum.accumulate(low)


def _cut_by_crossing(line: _Line, k: int, low: Ints) -> Ints | None:
    n, work = len(line.time) - 1, line.time
    start = np.zeros((k, n + 1), dtype=np.int64)
    ends = np.arange(n + 1)
    best = np.where(ends == 0, 0.0, np.inf)
    for s in range(k):
        row = min(s, len(line.speed) - 1)
        speed, first = line.speed[row, 0], np.maximum(low, _first_fit(line, row))
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


def _first_fit(line: _Line, row: int) -> Ints:
    """For every end j the least start i such that [i, j) fits in the memory of a stage that does not recompute."""
    held = line.bytes + line.in_flight[row] * line.activation
    room = line.limit[row, 0] * (1 + TOLERANCE)
    if not np.isfinite(room):
        return np.zeros(len(held), dtype=np.int64)
    first: Ints = np.minimum(np.searchsorted(held, held - room), np.arange(len(held)))
    return first


def _cut_by_column(
    line: _Line, k: int, low: Ints, ends: tuple[list[int], list[int]], swept: Iterable[Column]
) -> Ints | None:
    n = len(line.time) - 1
    best = np.full((k + 1, n + 1), np.inf)  # row s + 1 is stage s; row 0 is what lies before stage 0
    best[0, 0] = 0.0
    best[1:, 0] = [np.inf if least else 0.0 for least in ends[0]]
    start = np.zeros((k, n + 1), dtype=np.int64)
    for j, column in enumerate(swept, start=1):
        here = slice(int(low[j]), j)
        value = np.maximum(best[:k, here], _loads(line, here, j, column))
        choice = value.argmin(axis=1) if j > here.start else None
        for s in range(k):
            if not ends[0][s] <= j <= ends[1][s]:
                continue
            found = value[s, choice[s]] if choice is not None else inf
            if best[s, j] <= found:  # an empty stage is as good
                best[s + 1, j], start[s, j] = best[s, j], j
            elif choice is not None:
                best[s + 1, j], start[s, j] = found, here.start + choice[s]
    return start if np.isfinite(best[k, n]) else None


def _loads(line: _Line, here: slice, j: int, column: Column) -> Floats:
    """The load of [i, j) as stage s, for every row of stages and every i; infinite when it does not fit."""
    sent, received, inbox, shared = column
    work, again = line.time[j] - line.time[here], line.forward[j] - line.forward[here]
    once = _load(work / line.speed, sent, received, overlap=line.overlap)
    twice = _load((work + again) / line.speed, sent, received, overlap=line.overlap) if line.asked.any() else once
    if not line.bounded:
        return np.where(line.asked > 0, twice, once)
    limit, saved = line.limit * (1 + TOLERANCE), line.activation[j] - line.activation[here]
    kept = line.bytes[j] - line.bytes[here] + shared + line.in_flight * inbox
    fits_once = (line.asked <= 0) & (kept + line.in_flight * saved <= limit)
    fits_twice = (line.asked != 0) & (kept + saved <= limit)
    return np.where(fits_once, once, np.where(fits_twice, twice, np.inf))


def _load(compute: Floats, sent: Floats, received: Floats, *, overlap: bool) -> Floats:
    if overlap:
        return np.maximum(compute, np.maximum(sent, received))
    return compute + (sent + received)
