"""Cut over all down-sets, optimally: the dynamic program of a chain, with down-sets in the place of positions.

      ┌─▶ b ─┐                               ┌─▶ ab ─┐
    a ┤      ├─▶ d   has six down-sets  {} ─▶ a       ├─▶ abc ─▶ abcd      best[s][I] = min over J inside I of
      └─▶ c ─┘                               └─▶ ac ─┘                                 max(best[s - 1][J], load_s(J, I))

A down-set J is what the stages up to a boundary hold; stage s takes I - J. Stage windows leave few down-sets to each boundary.
What I - J sends and receives is a sum of products of a function of J and a function of I, so all loads are matrix products:
with N down-sets per boundary and F flows O(K N^2 F). Most networks are nearly chains and have few down-sets. Tarnawski et al.,
"Efficient algorithms for device placement of DNN operator graphs", 2020.

Without multicast, a sender pays once per side (before, after), as in `interval_traffic.py`: then the value is a lower bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from pipecompile.partitioners.bounds.stage_windows import StageWindows
from pipecompile.partitioners.clusters import Adjacency, Clusters, Flow, adjacency
from pipecompile.partitioners.dp.down_set_levels import DownSetLevels, as_rows
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import TOLERANCE

__all__ = ["MAX_PAIRS", "DownSets", "cut_down_sets", "enumerate_down_sets"]

Floats = NDArray[np.float64]
Bits = NDArray[np.uint8]
DownSets = list[Bits]
"""Per boundary, including those before stage 0 and after the last stage, the down-sets as 0/1 rows (down-sets, clusters)."""

MAX_DOWN_SETS = 30_000
"""Down-sets listed for a boundary, and those passed on the way to them that no deadline ends: some tenths of a second."""

MAX_PAIRS = 1_000_000
"""Default number of pairs (J, I), candidate stages, that are evaluated: some tenths of a second."""

BLOCK_PAIRS = 1_000_000
"""Pairs evaluated in one matrix: some 50 MB."""


def enumerate_down_sets(
    clusters: Clusters, windows: StageWindows, n_stages: int, deadline: float = inf
) -> DownSets | None:
    """Return the down-sets that the windows leave to every boundary; None if there are more than `MAX_DOWN_SETS`, or after the
    deadline if more were passed.
    """
    neighbours = adjacency(clusters)
    down_sets = [np.zeros((1, len(clusters)), dtype=np.uint8)]
    for s in range(n_stages - 1):
        masks = _down_sets_after(clusters, windows, s, neighbours, deadline)
        if masks is None:
            return None
        down_sets.append(as_rows(masks, len(clusters)))
    down_sets.append(np.ones((1, len(clusters)), dtype=np.uint8))
    return down_sets


def cut_down_sets(
    clusters: Clusters,
    machine: Machine,
    down_sets: DownSets,
    target: float = inf,
    max_pairs: int = MAX_PAIRS,
    deadline: float = inf,
) -> tuple[list[int] | None, float] | None:
    """Return the best cut over the down-sets and a lower bound of the bottleneck of every such cut. A boundary may have no down-set:
    then there is no cut.

    The bound is exact if every flow has one consumer or multicast holds. The cut is None and the bound infinite if no cut is
    below the target or fits in memory. The result is None if there are more than `max_pairs` candidate stages that begin
    where a partial cut below the target ends, or after the deadline. Requires `machine.is_one_to_one` and equal links.
    """
    best, alive, steps = np.zeros(1), np.zeros(1, dtype=np.int64), list[_Step]()
    for s, (lower, upper) in enumerate(zip(down_sets, down_sets[1:], strict=False)):
        if not len(upper):  # no boundary is within the windows
            return None, inf
        max_pairs -= len(alive) * len(upper)
        if max_pairs < 0 or monotonic() > deadline:
            return None
        best, origin = _best_stages(lower[alive], upper, best, clusters, machine, s)
        steps.append((alive, origin))
        alive = np.flatnonzero(best <= target * (1 + TOLERANCE))
        best = best[alive]
        if not len(alive):
            return None, inf
    return _traceback(down_sets, steps) if best[0] < inf else None, float(best[0])


_Step = tuple[NDArray[np.int64], NDArray[np.int64]]
"""(indices of the down-sets before a stage that are below the target, for every down-set after it the best among these)."""


def _best_stages(
    lower: Bits, upper: Bits, best: Floats, clusters: Clusters, machine: Machine, s: int
) -> tuple[Floats, NDArray[np.int64]]:
    """Return, per down-set I after stage s, the least bottleneck up to stage s, and the index of its J."""
    step = max(1, BLOCK_PAIRS // len(upper))
    values, choices = np.full(len(upper), np.inf), np.zeros(len(upper), dtype=np.int64)
    for start in range(0, len(lower), step):
        rows = slice(start, start + step)
        value = np.maximum(best[rows, None], _loads(lower[rows], upper, clusters, machine, s))
        choice = value.argmin(axis=0)
        least = value[choice, np.arange(len(upper))]
        choices[least < values] = start + choice[least < values]
        values = np.minimum(values, least)
    return values, choices


def _traceback(down_sets: DownSets, steps: Sequence[_Step]) -> list[int]:
    """Return the stage of every cluster along the best choices."""
    assignment = np.zeros(down_sets[0].shape[1], dtype=np.int64)
    here = 0
    for s in reversed(range(len(steps))):
        alive, origin = steps[s]
        before = int(alive[origin[here]])
        assignment[down_sets[s + 1][here] > down_sets[s][before]] = s
        here = before
    return [int(s) for s in assignment]


# -- down-sets --------------------------------------------------------------------------------------------------------


def _down_sets_after(
    clusters: Clusters,
    windows: StageWindows,
    s: int,
    neighbours: Adjacency,
    deadline: float,
) -> list[int] | None:
    """Return, as bit masks, the down-sets after stage s within the windows and their work bounds; None if too many."""
    fixed = sum(1 << v for v, latest in enumerate(windows.latest.tolist()) if latest <= s)
    ranges = zip(windows.earliest.tolist(), windows.latest.tolist(), strict=True)
    free = {v for v, (a, b) in enumerate(ranges) if a <= s < b}
    slack = windows.total_work * TOLERANCE
    min_work, masks, passed = windows.min_work[s] - slack, list[int](), 0
    levels = DownSetLevels(clusters.time, neighbours, fixed, free, windows.max_work[s] + slack)
    while levels.level:
        masks += [mask for mask, (_, work, _) in levels.level.items() if work >= min_work]
        passed += len(levels.level)
        levels.advance(MAX_DOWN_SETS - len(masks))
        if len(masks) + len(levels.level) > MAX_DOWN_SETS or (passed > MAX_DOWN_SETS and monotonic() > deadline):
            return None
    return masks


# -- loads: matrices (J, I) -------------------------------------------------------------------------------------------


def _loads(lower: Bits, upper: Bits, clusters: Clusters, machine: Machine, s: int) -> Floats:
    """Return [J, I]: the load of I - J as stage s; infinite if J is not inside I or I - J does not fit in memory."""
    required = machine.recompute[s]
    time, forward = _difference(lower, upper, clusters.time), _difference(lower, upper, clusters.forward)
    traffic = _sent(lower, upper, clusters.flows, machine), _received(lower, upper, clusters.flows)
    loads = [np.full(time.shape, np.inf)]
    fitting = _fitting(lower, upper, clusters, machine, s)
    for recompute, fits in zip((True, False), fitting, strict=True):
        if required in (None, recompute):
            compute = (time + forward if recompute else time) / machine.speed[s]
            load = np.maximum(compute, np.maximum(*traffic)) if machine.overlap else compute + traffic[0] + traffic[1]
            loads.append(np.where(fits, load, loads[-1]))
    loads[-1][~_nested(lower, upper, clusters.strict_arcs)] = np.inf
    return loads[-1]


def _fitting(
    lower: Bits, upper: Bits, clusters: Clusters, machine: Machine, s: int
) -> tuple[NDArray[np.bool_] | bool, NDArray[np.bool_] | bool]:
    """Return [J, I] twice: whether I - J fits in memory with recomputation, and without."""
    if machine.memory_limit[s] == inf:
        return True, True
    other = _difference(lower, upper, clusters.bytes) + _shared(lower, upper, clusters.shared)
    other += machine.in_flight[s] * _received(lower, upper, clusters.flows, in_bytes=True)
    activation, limit = _difference(lower, upper, clusters.activation), machine.memory_limit[s] * (1 + TOLERANCE)
    return other + activation <= limit, other + machine.in_flight[s] * activation <= limit


def _nested(lower: Bits, upper: Bits, strict_arcs: Iterable[tuple[int, int]]) -> NDArray[np.bool_]:
    """Return [J, I]: whether J is inside I and I - J holds no pair apart."""
    undecided = lower.any(axis=0) & ~upper.all(axis=0)
    outside = lower[:, undecided].astype(np.float32) @ (1 - upper[:, undecided].astype(np.float32)).T
    nested: NDArray[np.bool_] = outside == 0
    for a, b in strict_arcs:
        nested &= ~np.outer(~(lower[:, a] | lower[:, b]) & 1, upper[:, a] & upper[:, b]).astype(bool)
    return nested


def _difference(lower: Bits, upper: Bits, column: Sequence[float]) -> Floats:
    """Return [J, I]: the sum of a column over I - J."""
    amounts = np.asarray(column, dtype=np.float64)
    return np.maximum((upper @ amounts)[None, :] - (lower @ amounts)[:, None], 0.0)


def _sent(lower: Bits, upper: Bits, flows: Iterable[Flow], machine: Machine) -> Floats:
    """Return [J, I]: the seconds that I - J sends."""
    total = _OuterProductSum(len(lower), len(upper))
    for flow in flows:
        not_before, produced = 1 - lower[:, flow.source], upper[:, flow.source]
        if flow.time and not_before.any() and produced.any():
            all_inside = upper[:, flow.consumers].min(axis=1)
            some_before = lower[:, flow.consumers].max(axis=1)
            total.add(flow.time, not_before, produced * (1 - all_inside))  # a consumer is not in I yet
            earlier = produced * all_inside if machine.multicast else produced
            total.add(flow.time, not_before * some_before, earlier)  # a consumer is in J already
    return total.sum()


def _received(lower: Bits, upper: Bits, flows: Iterable[Flow], *, in_bytes: bool = False) -> Floats:
    """Return [J, I]: the seconds, or the bytes, that I - J receives."""
    total = _OuterProductSum(len(lower), len(upper))
    for flow in flows:
        amount = flow.bytes if in_bytes else flow.time
        if amount:
            after, before = 1 - upper[:, flow.source], lower[:, flow.source]
            for left, right in _any_inside(lower, upper, flow.consumers):
                total.add(amount, left, right * after)  # the source is after I
                total.add(amount, left * before, right * (1 - after))  # the source is in J
    return total.sum()


def _shared(lower: Bits, upper: Bits, shared: Iterable[tuple[tuple[int, ...], float]]) -> Floats:
    """Return [J, I]: the shared bytes that I - J holds."""
    total = _OuterProductSum(len(lower), len(upper))
    for users, size in shared:
        for left, right in _any_inside(lower, upper, users):
            total.add(size, left, right)
    return total.sum()


def _any_inside(lower: Bits, upper: Bits, users: tuple[int, ...]) -> Iterable[tuple[Bits, Bits]]:
    """Yield columns over J and over I whose outer products add up to 1 where some user is in I - J, else to 0.

    One pair for every subset of the users that some I holds: (J lacks a user of the subset, I holds exactly the subset).
    """
    inside = upper[:, users]
    for subset in np.unique(inside, axis=0) if len(users) > 1 else np.ones((1, 1), dtype=np.uint8):
        left = (lower[:, users] < subset).any(axis=1).astype(np.uint8)
        if left.any() and subset.any():
            yield left, (inside == subset).all(axis=1).astype(np.uint8)


class _OuterProductSum:
    """A sum of weighted outer products. Those with equal left factors are merged; the sum is one matrix product."""

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
