"""Traffic of intervals: the time and bytes that every interval of a linear order sends, receives and holds.

An interval [i, j) of positions is a point of the (i, j) plane, and each amount a sum of rectangles there. A tensor from
position p to consumers q1 < p < q2:

    sent      i <= p < j  and  (i > q1  or  j <= q2)          received      q in [i, j) for a q, p not in [i, j)

The buffers of received tensors, in bytes, follow the same rectangles as `received`. Bytes that several nodes share are held
if one of the nodes is inside. The amounts are yielded column by column (one end j, all starts i), summed by second
differences: O(rectangles + n * width) time, O(n) memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pipecompile.partitioners.clusters import Clusters

__all__ = ["IntervalColumn", "interval_columns"]

Floats = NDArray[np.float64]
IntervalColumn = tuple[Floats, Floats, Floats, Floats]
"""For one end j and the starts from low[j] to j - 1: sent seconds, received seconds, buffer bytes, shared bytes."""

Rectangle = tuple[int, int, int, int, float]
"""(i0, i1, j0, j1, amount): adds the amount where `i0 <= i < i1` and `j0 <= j < j1`."""


def interval_columns(
    clusters: Clusters,
    order: Sequence[int],
    low: Sequence[int],
    *,
    multicast: bool,
    copies: Sequence[int] | None = None,
) -> Iterator[IntervalColumn]:
    """Yield, for the ends j = 1, 2, ..., the amounts of all intervals [i, j) with low[j] <= i < j; `low` is ascending.

    Without multicast, a tensor costs its sender once per side (before, after), a lower bound of the true cost; with `copies`, a
    number of receivers per flow, it costs its sender that many times.
    """
    n = len(order)
    position = {cluster: p for p, cluster in enumerate(order)}
    flows = [(position[flow.source], sorted(position[c] for c in flow.consumers), flow) for flow in clusters.flows]
    paid = [flow.time * (1 if copies is None else copies[n]) for n, flow in enumerate(clusters.flows)]
    once = multicast or copies is not None
    users = [(sorted(position[v] for v in group), size) for group, size in clusters.shared]
    sent = (
        r for (p, q, _), time in zip(flows, paid, strict=True) if time for r in _sent(p, q, time, n, multicast=once)
    )
    received = (r for p, q, flow in flows if flow.time for r in _received(p, q, flow.time, n))
    inbox = (r for p, q, flow in flows if flow.bytes for r in _received(p, q, flow.bytes, n))
    shared = (r for q, size in users for r in _containing(q, size, n))
    return zip(*(_summed(rectangles, n, low) for rectangles in (sent, received, inbox, shared)), strict=True)


def _sent(p: int, q: Sequence[int], amount: float, n: int, *, multicast: bool) -> Iterator[Rectangle]:
    if q[0] < p:
        yield q[0] + 1, p + 1, p + 1, n + 1, amount
    if q[-1] > p:
        yield 0, p + 1, p + 1, q[-1] + 1, amount
    if multicast and q[0] < p < q[-1]:
        yield q[0] + 1, p + 1, p + 1, q[-1] + 1, -amount


def _received(p: int, q: Sequence[int], amount: float, n: int) -> Iterator[Rectangle]:
    """Yield disjoint rectangles: an interval before the source counts at its last consumer, after the source at its first."""
    middle = bisect_left(q, p)
    for here, after in zip(q[:middle], [*q[:middle], p][1:], strict=True):
        yield 0, here + 1, here + 1, after + 1, amount
    for here, before in zip(q[middle:], [p, *q[middle:]][:-1], strict=True):
        yield before + 1, here + 1, here + 1, n + 1, amount


def _containing(q: Sequence[int], amount: float, n: int) -> Iterator[Rectangle]:
    """Yield disjoint rectangles of the intervals that contain one of the positions: each counts at the last one."""
    for here, after in zip(q, [*q[1:], n], strict=True):
        yield 0, here + 1, here + 1, after + 1, amount


def _summed(rectangles: Iterable[Rectangle], n: int, low: Sequence[int]) -> Iterator[Floats]:
    """Yield the sum of rectangles, column by column: second differences, cumulated along both axes."""
    corners = [c for i0, i1, j0, j1, t in rectangles for c in ((j0, i0, t), (j0, i1, -t), (j1, i0, -t), (j1, i1, t))]
    if not corners:
        yield from (np.zeros(j - low[j]) for j in range(1, n + 1))
        return
    table = np.array(corners, dtype=np.float64)
    table = table[np.argsort(table[:, 0], kind="stable")]
    ends = np.searchsorted(table[:, 0], np.arange(n + 2))
    rows, amounts = table[:, 1].astype(np.int64), table[:, 2]
    difference, base, passed = np.zeros(n + 2), 0.0, 0
    for j in range(1, n + 1):
        inside = slice(ends[j], ends[j + 1])
        np.add.at(difference, rows[inside], amounts[inside])
        base += amounts[inside][rows[inside] < passed].sum()
        base += difference[passed : low[j]].sum()
        passed = low[j]
        column = np.cumsum(difference[passed:j])
        column += base
        yield column
