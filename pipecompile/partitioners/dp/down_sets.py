"""The exact cut of a graph with few down-sets: the dynamic program of a chain, with down-sets in the place of positions.

      ┌─▶ b ─┐                               ┌─▶ ab ─┐
    a ┤      ├─▶ d   has six down-sets  {} ─▶ a       ├─▶ abc ─▶ abcd      best[s][I] = min over J inside I of
      └─▶ c ─┘                               └─▶ ac ─┘                                 max(best[s - 1][J], load_s(J, I))

A down-set is all that is in the stages up to a boundary, so windows leave few of them to each: its band. Stage s takes I - J. What
that sends and receives is a product of "says J" and "says I", so all loads are matrix products: with N down-sets per boundary and
F flows O(K N^2 F). Most networks are nearly chains and have few. Tarnawski et al., "Efficient algorithms for device placement
of DNN operator graphs", 2020. Without multicast, a sender is charged per side as in `chain`: then the value is a lower bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from pipecompile.partitioners.bounds.reachability import neighbours
from pipecompile.partitioners.bounds.stage_windows import Windows
from pipecompile.partitioners.clusters import Clusters, Flow
from pipecompile.partitioners.machine import Stages
from pipecompile.partitioners.objective import TOLERANCE

__all__ = ["Bands", "bands", "cut_lattice"]

Floats = NDArray[np.float64]
Bits = NDArray[np.uint8]
Bands = list[Bits]
"""For every boundary, the one before stage 0 and the one after the last included, down-sets as rows over clusters."""

MOST = 30_000
"""Down-sets that are listed for a boundary: some tenths of a second."""

PAIRS = 1_000_000
"""Stages (pairs of down-sets) that are looked at, unless told otherwise: some tenths of a second."""

BLOCK = 1_000_000
"""Stages that are looked at together: some 50 MB."""


def bands(clusters: Clusters, windows: Windows, n_stages: int) -> Bands | None:
    """The down-sets that windows leave to every boundary, or None when there are too many."""
    before, after = neighbours(clusters)
    found = [np.zeros((1, len(clusters)), dtype=np.uint8)]
    for s in range(n_stages - 1):
        sets = _between(clusters, windows, s, before, after)
        if sets is None:
            return None
        found.append(_as_rows(sets, len(clusters)))
    found.append(np.ones((1, len(clusters)), dtype=np.uint8))
    return found


def cut_lattice(
    clusters: Clusters, stages: Stages, found: Bands, target: float = inf, pairs: int = PAIRS, deadline: float = inf
) -> tuple[list[int] | None, float] | None:
    """The best cut within the bands and a lower bound of every such cut's bottleneck, which it meets if every flow has one
    consumer or multicast holds. The cut is None, the bound infinite, when none stays below the target, or none fits in
    memory. None when there are too many stages to look at: those that begin where something below the target ends; or when
    the deadline comes first.

    Stages must be devices of their own, with like links.
    """
    best, alive, steps = np.zeros(1), np.zeros(1, dtype=np.int64), list[_Step]()
    for s, (lower, upper) in enumerate(zip(found, found[1:], strict=False)):
        pairs -= len(alive) * len(upper)
        if pairs < 0 or monotonic() > deadline:
            return None
        best, origin = _stage(lower[alive], upper, best, clusters, stages, s)
        steps.append((alive, origin))
        alive = np.flatnonzero(best <= target * (1 + TOLERANCE))
        best = best[alive]
        if not len(alive):
            return None, inf
    return _traced(found, steps) if best[0] < inf else None, float(best[0])


_Step = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Which down-sets before a stage can be reached; for every down-set after it, which of these is the best to come from."""


def _stage(
    lower: Bits, upper: Bits, best: Floats, clusters: Clusters, stages: Stages, s: int
) -> tuple[Floats, NDArray[np.int64]]:
    """For every I the least bottleneck up to stage s, and the J that gives it."""
    step = max(1, BLOCK // len(upper))
    values, choices = np.full(len(upper), np.inf), np.zeros(len(upper), dtype=np.int64)
    for start in range(0, len(lower), step):
        rows = slice(start, start + step)
        value = np.maximum(best[rows, None], _loads(lower[rows], upper, clusters, stages, s))
        choice = value.argmin(axis=0)
        least = value[choice, np.arange(len(upper))]
        choices[least < values] = start + choice[least < values]
        values = np.minimum(values, least)
    return values, choices


def _traced(found: Bands, steps: Sequence[_Step]) -> list[int]:
    stage = np.zeros(found[0].shape[1], dtype=np.int64)
    here = 0
    for s in reversed(range(len(steps))):
        alive, origin = steps[s]
        before = int(alive[origin[here]])
        stage[found[s + 1][here] > found[s][before]] = s
        here = before
    return [int(s) for s in stage]


# -- down-sets --------------------------------------------------------------------------------------------------------


def _between(
    clusters: Clusters, windows: Windows, s: int, before: list[list[int]], after: list[list[int]]
) -> list[int] | None:
    """The down-sets after stage s as bit masks: all that must be in it, and some of what may be, with so much work."""
    fixed = sum(1 << v for v, last in enumerate(windows.last.tolist()) if last <= s)
    free = {v for v, (a, b) in enumerate(zip(windows.first.tolist(), windows.last.tolist(), strict=True)) if a <= s < b}
    needs = {v: sum(1 << a for a in before[v] if a in free) for v in free}
    work = sum(time for v, time in enumerate(clusters.time) if fixed >> v & 1)
    slack = windows.total * TOLERANCE
    least, most_work = windows.least[s] - slack, windows.most[s] + slack
    ready = sum(1 << v for v, need in needs.items() if not need)
    level, found = {fixed: (ready, work)}, []
    while level:
        found += [mask for mask, (_, work) in level.items() if work >= least]
        if len(found) + len(level) > MOST:
            return None
        following: dict[int, tuple[int, float]] = {}
        for mask, (ready, work) in level.items():
            for v in _bits(ready):
                larger = mask | 1 << v
                if larger not in following and work + clusters.time[v] <= most_work:
                    freed = sum(1 << b for b in after[v] if b in free and not needs[b] & ~larger)
                    following[larger] = ready & ~(1 << v) | freed, work + clusters.time[v]
        level = following
    return found


def _bits(mask: int) -> list[int]:
    bits = []
    while mask:
        low = mask & -mask
        bits.append(low.bit_length() - 1)
        mask ^= low
    return bits


def _as_rows(sets: Sequence[int], n: int) -> Bits:
    width = (n + 7) // 8
    packed = np.frombuffer(b"".join(mask.to_bytes(width, "little") for mask in sets), dtype=np.uint8)
    return np.unpackbits(packed.reshape(len(sets), width), axis=1, count=n, bitorder="little")


# -- loads ------------------------------------------------------------------------------------------------------------


def _loads(lower: Bits, upper: Bits, clusters: Clusters, stages: Stages, s: int) -> Floats:
    """[J, I] is the load of I - J as stage s, infinite where it is none or does not fit in memory."""
    asked = stages.recompute[s]
    time, forward = _added(lower, upper, clusters.time), _added(lower, upper, clusters.forward)
    moved = _sent(lower, upper, clusters.flows, stages), _received(lower, upper, clusters.flows)
    loads = [np.full(time.shape, np.inf)]
    fit = _fitting(lower, upper, clusters, stages, s)
    for again, fits in zip((True, False), fit, strict=True):
        if asked in (None, again):
            compute = (time + forward if again else time) / stages.speed[s]
            load = np.maximum(compute, np.maximum(*moved)) if stages.overlap else compute + moved[0] + moved[1]
            loads.append(np.where(fits, load, loads[-1]))
    loads[-1][~_nested(lower, upper, clusters.strict)] = np.inf
    return loads[-1]


def _fitting(
    lower: Bits, upper: Bits, clusters: Clusters, stages: Stages, s: int
) -> tuple[NDArray[np.bool_] | bool, NDArray[np.bool_] | bool]:
    """Whether I - J fits in memory when it recomputes, and when it does not."""
    if stages.limit[s] == inf:
        return True, True
    kept = _added(lower, upper, clusters.bytes) + _shared(lower, upper, clusters.shared)
    kept += stages.in_flight[s] * _received(lower, upper, clusters.flows, held=True)
    saved, limit = _added(lower, upper, clusters.activation), stages.limit[s] * (1 + TOLERANCE)
    return kept + saved <= limit, kept + stages.in_flight[s] * saved <= limit


def _nested(lower: Bits, upper: Bits, strict: Iterable[tuple[int, int]]) -> NDArray[np.bool_]:
    """[J, I] is true when J is inside I, and I - J holds no pair apart."""
    open_columns = lower.any(axis=0) & ~upper.all(axis=0)
    over = lower[:, open_columns].astype(np.float32) @ (1 - upper[:, open_columns].astype(np.float32)).T
    nested: NDArray[np.bool_] = over == 0
    for a, b in strict:
        nested &= ~np.outer(~(lower[:, a] | lower[:, b]) & 1, upper[:, a] & upper[:, b]).astype(bool)
    return nested


def _added(lower: Bits, upper: Bits, column: Sequence[float]) -> Floats:
    """[J, I] is the sum of a column over I - J."""
    amounts = np.asarray(column, dtype=np.float64)
    return np.maximum((upper @ amounts)[None, :] - (lower @ amounts)[:, None], 0.0)


def _sent(lower: Bits, upper: Bits, flows: Iterable[Flow], stages: Stages) -> Floats:
    """[J, I] is what I - J sends."""
    total = _Product(len(lower), len(upper))
    for flow in flows:
        fresh, made = 1 - lower[:, flow.source], upper[:, flow.source]
        if flow.time and fresh.any() and made.any():
            every = upper[:, flow.consumers].min(axis=1)
            some = lower[:, flow.consumers].max(axis=1)
            total.add(flow.time, fresh, made * (1 - every))  # a consumer is not in I yet
            total.add(flow.time, fresh * some, made * every if stages.multicast else made)  # one is in J already
    return total.sum()


def _received(lower: Bits, upper: Bits, flows: Iterable[Flow], *, held: bool = False) -> Floats:
    """[J, I] is what I - J receives, in time or in bytes."""
    total = _Product(len(lower), len(upper))
    for flow in flows:
        amount = flow.bytes if held else flow.time
        if amount:
            outside, before = 1 - upper[:, flow.source], lower[:, flow.source]
            for left, wanted in _parts(lower, upper, flow.consumers):
                total.add(amount, left, wanted * outside)  # made after I
                total.add(amount, left * before, wanted * (1 - outside))  # made in J
    return total.sum()


def _shared(lower: Bits, upper: Bits, shared: Iterable[tuple[tuple[int, ...], float]]) -> Floats:
    """[J, I] is what I - J holds of bytes that several clusters use."""
    total = _Product(len(lower), len(upper))
    for users, size in shared:
        for left, wanted in _parts(lower, upper, users):
            total.add(size, left, wanted)
    return total.sum()


def _parts(lower: Bits, upper: Bits, users: tuple[int, ...]) -> Iterable[tuple[Bits, Bits]]:
    """Columns over J and I whose products add up to 1 where some of the users is in I - J: for every part of the users
    that some I holds, [J lacks some of this part] and [I holds just this part].
    """
    held = upper[:, users]
    for part in np.unique(held, axis=0) if len(users) > 1 else np.ones((1, 1), dtype=np.uint8):
        left = (lower[:, users] < part).any(axis=1).astype(np.uint8)
        if left.any() and part.any():
            yield left, (held == part).all(axis=1).astype(np.uint8)


class _Product:
    """A sum of outer products, those with the same left factor put together, added up in one product of matrices."""

    def __init__(self, rows: int, columns: int) -> None:
        self._shape, self._left, self._right = (rows, columns), dict[bytes, Bits](), dict[bytes, Floats]()

    def add(self, amount: float, left: Bits, right: Bits) -> None:
        if left.any() and right.any():
            key = left.tobytes()
            self._left[key] = left
            self._right.setdefault(key, np.zeros(self._shape[1]))
            self._right[key] += amount * right

    def sum(self) -> Floats:
        if not self._left:
            return np.zeros(self._shape)
        left = np.stack(list(self._left.values()), axis=1).astype(np.float64)
        product: Floats = left @ np.stack(list(self._right.values()))
        return product
