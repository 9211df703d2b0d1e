"""The exact cut of a graph with few down-sets: the dynamic program of a chain, with down-sets in the place of positions.

      ┌─▶ b ─┐                               ┌─▶ ab ─┐
    a ┤      ├─▶ d   has six down-sets  {} ─▶ a       ├─▶ abc ─▶ abcd      best[s][I] = min over J inside I of
      └─▶ c ─┘                               └─▶ ac ─┘                                 max(best[s - 1][J], load_s(J, I))

Stage s takes I - J. What that sends and receives is a product of "says J" and "says I", so all loads are matrix products: with N down-sets and F
flows O(N^2 (F + K)). Most networks are nearly chains and have few. Tarnawski et al., "Efficient algorithms for device placement
of DNN graph operators", 2020. Without multicast, a sender is charged per side as in `chain`: then the value is a lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipecompile.partitioners.clusters import Clusters, Stages
from pipecompile.partitioners.loads import TOLERANCE
from pipecompile.partitioners.orders import neighbours

__all__ = ["MOST", "cut_lattice"]

MOST = 1000
"""Down-sets up to which this is tried: at most some hundred milliseconds and 100 MB."""

Floats = NDArray[np.float64]


def cut_lattice(clusters: Clusters, stages: Stages, most: int = MOST) -> tuple[list[int] | None, float] | None:
    """The best cut and a lower bound of every cut's bottleneck, which it meets if every flow has one consumer or multicast
    holds. The cut is None, the bound infinite, when none fits in memory. None when there are too many down-sets.
    """
    sets = _down_sets(clusters, most)
    if sets is None or len(sets) * len(clusters.flows) > 4 * most * most:
        return None
    inside = np.array([[mask >> v & 1 for v in range(len(clusters))] for mask in sets], dtype=np.float64)
    compute, sent, received = _work(inside, clusters.time), *_traffic(inside, clusters, stages.multicast)
    nested = inside @ (1 - inside).T == 0
    best = np.full(len(sets), np.inf)
    best[0] = 0.0
    origin = []
    for speed, limit, in_flight in zip(stages.speed, stages.limit, stages.in_flight, strict=True):
        parts = compute / speed, sent, received
        load = np.maximum.reduce(parts) if stages.overlap else parts[0] + parts[1] + parts[2]
        held = _work(inside, np.array(clusters.bytes) + in_flight * np.array(clusters.activation))
        value = np.where(nested & (held <= limit * (1 + TOLERANCE)), np.maximum(best[:, None], load), np.inf)
        origin.append(value.argmin(axis=0))
        best = value.min(axis=0)
    return _traced(inside, origin) if np.isfinite(best[-1]) else None, float(best[-1])


def _traced(inside: Floats, origin: Sequence[NDArray[np.intp]]) -> list[int]:
    stage = np.zeros(inside.shape[1], dtype=np.int64)
    here = len(inside) - 1
    for s in reversed(range(len(origin))):
        before = int(origin[s][here])
        stage[(inside[here] - inside[before]) > 0] = s
        here = before
    return [int(s) for s in stage]


def _down_sets(clusters: Clusters, most: int) -> list[int] | None:
    """All down-sets as bit masks, small ones first, or None when there are more than `most`."""
    before, after = neighbours(clusters)
    needs = [sum(1 << a for a in sources) for sources in before]
    level = {0: sum(1 << v for v, need in enumerate(needs) if not need)}  # a down-set, and what can be added to it
    found: list[int] = []
    while level:
        found += level
        if len(found) > most:
            return None
        following: dict[int, int] = {}
        for mask, ready in level.items():
            for v in _bits(ready):
                larger = mask | 1 << v
                if larger not in following:
                    freed = sum(1 << b for b in after[v] if not needs[b] & ~larger)
                    following[larger] = ready & ~(1 << v) | freed
        level = following
    return found


def _bits(mask: int) -> list[int]:
    bits = []
    while mask:
        low = mask & -mask
        bits.append(low.bit_length() - 1)
        mask ^= low
    return bits


def _work(inside: Floats, column: Sequence[float] | Floats) -> Floats:
    """[J, I] is the sum of a column over I - J."""
    total = inside @ np.asarray(column, dtype=np.float64)
    return np.maximum(total[None, :] - total[:, None], 0.0)


def _traffic(inside: Floats, clusters: Clusters, multicast: bool) -> tuple[Floats, Floats]:
    """[J, I] is what I - J sends, and what it receives."""
    if not clusters.flows:
        return np.zeros((len(inside),) * 2), np.zeros((len(inside),) * 2)
    source = inside[:, [flow.source for flow in clusters.flows]]
    time = np.array([flow.time for flow in clusters.flows])
    some = np.stack([inside[:, flow.consumers].max(axis=1) for flow in clusters.flows], axis=1)
    every = np.stack([inside[:, flow.consumers].min(axis=1) for flow in clusters.flows], axis=1)
    forwards = ((1 - source) * time) @ (source * (1 - every)).T  # a consumer is not in I yet
    backwards = ((1 - source) * some * time) @ (source * (every if multicast else 1)).T  # one is in J already
    owner, wanted, left = _patterns(inside, clusters)
    source, time = source[:, owner], time[owner]
    received = (left * time) @ (wanted * (1 - source)).T + (left * source * time) @ (wanted * source).T
    return forwards + backwards, received


def _patterns(inside: Floats, clusters: Clusters) -> tuple[list[int], Floats, Floats]:
    """A column for every flow and every set of its consumers that some I holds: the flow, [I holds just these of its
    consumers], [J lacks one of these]. The product of the last two says that a consumer is in I - J.
    """
    owner, wanted, left = [], [], []
    for number, flow in enumerate(clusters.flows):
        held = inside[:, flow.consumers]
        for pattern in sorted(set(map(tuple, held.tolist()))):
            if any(pattern):
                owner.append(number)
                wanted.append((held == pattern).all(axis=1))
                left.append((held < pattern).any(axis=1))
    return owner, np.stack(wanted, axis=1).astype(np.float64), np.stack(left, axis=1).astype(np.float64)
