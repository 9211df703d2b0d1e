"""Clusters that cannot share a stage, if the bottleneck is to stay below a target.

    v ──▶ x ──▶ w ──▶ c        v and w in one stage: so is x, and all three must fit below the target.
                 ╰─▶ far      `far` is a rival of v, so w sends to it: that must fit as well, and so on, round by round

Rivals are known for pairs that come before one another. They are closed: what comes before v is a rival of what comes
after w. Three rounds of some products of matrices, O(clusters^3) operations that a processor is good at.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from pipecompile.partitioners.bounds.reachability import neighbours
from pipecompile.partitioners.clusters import Clusters
from pipecompile.partitioners.machine import Stages

__all__ = ["LARGEST", "minimal", "rivals"]

LARGEST = 2000
"""Clusters up to which rivals are looked for: some seconds of products."""

ROUNDS = 3

SLACK = 1e-4
"""Single precision is off by less than this."""

Floats = NDArray[np.float32]
Pairs = NDArray[np.bool_]


def rivals(clusters: Clusters, stages: Stages, target: float, reach: Pairs) -> Pairs:
    """[v, w] is true when v comes before w, as `reach` says, and no stage that stays below the target holds both."""
    ones = reach.astype(np.float32)
    work = _between(ones, np.array(clusters.time) / max(stages.speed) / target) if target else np.zeros_like(ones)
    found = (work > 1 + SLACK) | _too_large(clusters, stages, ones) | _asked(clusters, ones)
    price = 0.0 if stages.overlap or not target else stages.cheapest / target
    for _ in range(ROUNDS if price and clusters.flows else 0):
        leaving, entering = _moved(clusters, reach, found, price)
        load = work + (ones * leaving) @ ones + ones @ (entering * ones)
        more = found | ((load > 1 + SLACK) & reach)
        if (more == found).all():
            break
        found = more
    return found


def minimal(clusters: Clusters, found: Pairs) -> list[tuple[int, int]]:
    """The pairs from which all others follow."""
    before, after = neighbours(clusters)
    least = found.copy()
    for w, sources in enumerate(before):
        for a in sources:
            least[:, w] &= ~found[:, a]
    for v, sinks in enumerate(after):
        for b in sinks:
            least[v] &= ~found[b]
    return [(int(v), int(w)) for v, w in np.argwhere(least)]


def _between(ones: Floats, column: Iterable[float]) -> Floats:
    """[v, w] is the sum of a column over v, w and what lies between."""
    weighted: Floats = (ones * np.asarray(column, dtype=np.float32)) @ ones
    return weighted


def _too_large(clusters: Clusters, stages: Stages, ones: Floats) -> Pairs:
    most = max(stages.limit)
    if not stages.bounded or not 0 < most < np.inf:
        return np.zeros(ones.shape, dtype=bool)
    held = np.array(clusters.bytes) + stages.least_flying * np.array(clusters.activation)
    return _between(ones, held / most) > 1 + SLACK


def _asked(clusters: Clusters, ones: Floats) -> Pairs:
    """Pairs apart by the problem, and all that follows from them."""
    asked = np.zeros(ones.shape, dtype=np.float32)
    for a, b in clusters.strict:
        asked[a, b] = 1.0
    return (ones @ asked) @ ones > 0 if clusters.strict else asked > 0


def _moved(clusters: Clusters, reach: Pairs, found: Pairs, price: float) -> tuple[Floats, Floats]:
    """What cluster x moves between itself and rivals of the stage's other end: [v, x] with rivals of v, which come after,
    [x, w] with rivals of w, which come before. Each flow counts once at its source, and at one of its consumers.
    """
    leaving, entering = np.zeros(found.shape, dtype=np.float32), np.zeros(found.shape, dtype=np.float32)
    for flow in clusters.flows:
        time = flow.time * price
        later = [consumer for consumer in flow.consumers if not reach[consumer, flow.source]]
        if later:
            leaving[:, flow.source] += time * found[:, later].any(axis=1)
            entering[later[0]] += time * found[flow.source]
        else:
            earliest = flow.consumers[0]
            entering[flow.source] += time * found[list(flow.consumers)].any(axis=0)
            leaving[:, earliest] += time * found[:, flow.source]
    return leaving, entering
