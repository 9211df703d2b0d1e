"""Pairs of clusters that every cut below a target separates, and pairs that no such cut separates.

Separated pairs: clusters v before w that no stage with a load below the target holds together.

    v ──▶ x ──▶ w ──▶ c        v and w in one stage: so is x, and all three must fit below the target
                 ╰─▶ far      (v, far) is separated, so w sends to `far`: that must fit as well, and so on, in rounds

Pairs are related by precedence. The relation is closed: if (v, w) is separated, so is every pair of an ancestor of v and a
descendant of w. Each of three rounds computes, as products of (clusters, clusters) matrices, the least load of a stage with v
and w: the work between them and the tensors that cross to clusters already separated. O(clusters^3).

Contraction: merge the pairs that no cut below the target separates. It keeps the integer program small.

     u ══ 40 ══▶ v        target 70: apart, the stage of u would take 35 + 40, so u and v share a stage.
    35          10

If u and v are in different stages, the stage of u computes u and moves every tensor between the two. If that alone reaches
the target for u or for v, every better cut keeps them together. Merged clusters are heavier, so this repeats until a
fixed point.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from math import inf
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from pipecompile.partitioners.clusters import Clusters, adjacency, merge
from pipecompile.partitioners.machine import Machine

__all__ = ["Relation", "contract", "has_time_for_products", "minimal_pairs", "separated_pairs"]


MAX_CLUSTERS = 2000
"""Clusters up to which separated pairs are computed: a few seconds of matrix products."""

PRODUCT_SECONDS = 1e-10
"""Seconds of a product of (clusters, clusters) matrices, per clusters^3: those of a slow core."""

ROUNDS = 3
"""Rounds of the fixed-point iteration; each uses the pairs of the round before."""

SLACK = 1e-4
"""Upper bound of the relative error of single precision here."""

Floats = NDArray[np.float32]
Relation = NDArray[np.bool_]


def has_time_for_products(n_clusters: int, count: int, deadline: float) -> bool:
    """Return whether that many matrix products are expected to end before the deadline."""
    return monotonic() + count * PRODUCT_SECONDS * n_clusters**3 <= deadline


def separated_pairs(
    clusters: Clusters, machine: Machine, target: float, closure: Relation, deadline: float = inf
) -> Relation:
    """Return the matrix with [v, w] true iff v is an ancestor of w (by `closure`) and the pair is separated.

    With target 0 (no target), only memory and pairs apart separate. Rounds that would not end before the deadline are left out:
    every pair of the result is separated, but some separated pairs are missing.
    """
    reach = closure.astype(np.float32)
    no_work = np.zeros_like(reach)
    work = _sums_between(reach, np.array(clusters.time) / max(machine.speed) / target) if target else no_work
    pairs = (work > 1 + SLACK) | _exceed_memory(clusters, machine, reach) | _pairs_apart(clusters, reach)
    time_factor = 0.0 if machine.overlap or not target else machine.min_link_factor / target
    for _ in range(ROUNDS if time_factor and clusters.flows else 0):
        if not has_time_for_products(len(clusters), 2, deadline):
            break
        to_later, to_earlier = _traffic(clusters, closure, pairs, time_factor)
        load = work + (reach * to_later) @ reach + reach @ (to_earlier * reach)
        extended = pairs | ((load > 1 + SLACK) & closure)
        if (extended == pairs).all():
            break
        pairs = extended
    return pairs


def minimal_pairs(clusters: Clusters, pairs: Relation) -> list[tuple[int, int]]:
    """Return the pairs from which all others follow by precedence."""
    predecessors, successors = adjacency(clusters)
    minimal = pairs.copy()
    for w, sources in enumerate(predecessors):
        for a in sources:
            minimal[:, w] &= ~pairs[:, a]
    for v, sinks in enumerate(successors):
        for b in sinks:
            minimal[v] &= ~pairs[b]
    return [(int(v), int(w)) for v, w in np.argwhere(minimal)]


def _sums_between(reach: Floats, column: Iterable[float]) -> Floats:
    """Return [v, w]: the sum of a column over v, w and every cluster between them."""
    sums: Floats = (reach * np.asarray(column, dtype=np.float32)) @ reach
    return sums


def _exceed_memory(clusters: Clusters, machine: Machine, reach: Floats) -> Relation:
    """Return [v, w]: whether v, w and the clusters between them exceed the largest memory limit."""
    limit = max(machine.memory_limit)
    if not machine.has_memory_limit or not 0 < limit < np.inf:
        return np.zeros(reach.shape, dtype=bool)
    memory = np.array(clusters.bytes) + machine.min_in_flight * np.array(clusters.activation)
    return _sums_between(reach, memory / limit) > 1 + SLACK


def _pairs_apart(clusters: Clusters, reach: Floats) -> Relation:
    """Return the pairs apart of the problem, with all that follow from them by precedence."""
    strict = np.zeros(reach.shape, dtype=np.float32)
    for a, b in clusters.strict_arcs:
        strict[a, b] = 1.0
    return (reach @ strict) @ reach > 0 if clusters.strict_arcs else strict > 0


def _traffic(clusters: Clusters, closure: Relation, pairs: Relation, time_factor: float) -> tuple[Floats, Floats]:
    """Return the time of the tensors between a cluster x and clusters separated from one end of its stage.

    The first matrix, [v, x], counts clusters after x that are separated from v; the second, [x, w], clusters before x that
    are separated from w. Each flow counts once at its source and once at one of its consumers.
    """
    to_later, to_earlier = np.zeros(pairs.shape, dtype=np.float32), np.zeros(pairs.shape, dtype=np.float32)
    for flow in clusters.flows:
        time = flow.time * time_factor
        later = [consumer for consumer in flow.consumers if not closure[consumer, flow.source]]
        if later:
            to_later[:, flow.source] += time * pairs[:, later].any(axis=1)
            to_earlier[later[0]] += time * pairs[flow.source]
        else:
            earliest = flow.consumers[0]
            to_earlier[flow.source] += time * pairs[list(flow.consumers)].any(axis=0)
            to_later[:, earliest] += time * pairs[:, flow.source]
    return to_later, to_earlier


def contract(clusters: Clusters, machine: Machine, target: float) -> Clusters:
    """Return merged clusters with the same set of cuts below the target."""
    while pairs := list(_inseparable_pairs(clusters, machine, target)):
        clusters = merge(clusters, pairs)
    return clusters


def _inseparable_pairs(clusters: Clusters, machine: Machine, target: float) -> Iterator[tuple[int, int]]:
    sent: defaultdict[tuple[int, int], float] = defaultdict(float)  # seconds from the first to the second, if apart
    link_factor = machine.min_link_factor
    for flow in clusters.flows if link_factor else ():
        for consumer in flow.consumers:
            sent[flow.source, consumer] += flow.time * link_factor
    max_speed = max(machine.speed)
    for a, b in {(min(pair), max(pair)) for pair in sent}:
        forth, back = sent.get((a, b), 0.0), sent.get((b, a), 0.0)
        work = max(clusters.time[a], clusters.time[b]) / max_speed
        if (max(work, forth, back) if machine.overlap else work + forth + back) >= target:
            yield a, b
