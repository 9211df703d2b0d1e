"""Strategy of the dynamic programs: the orders of clusters that they cut, and the programs themselves, from cheap to thorough.

    cut_candidate_orders   candidate orders ─▶ cut each ─▶ best
    cut_all_down_sets      few down-sets ─▶ cut over all of them: optimal
    polish                 local search ─▶ order by stage ─▶ cut ─▶ local search ─▶ ...  until nothing improves

The first is optimal for a chain. For another graph it is optimal among the cuts along these orders.

An order is a list schedule that respects precedence: the ready cluster of least priority is placed next. The orders differ in
the priority. If pins or pairs apart restrict the stages of clusters, one barrier per boundary separates the clusters that must be
before it from those that must be after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from math import inf
from time import monotonic

from pipecompile.partitioners.bounds.separations import contract
from pipecompile.partitioners.bounds.stage_windows import StageWindows, compute_windows
from pipecompile.partitioners.clusters import Adjacency, Clusters, adjacency
from pipecompile.partitioners.constraints import StageRanges
from pipecompile.partitioners.dp.chain_partition import cut_order
from pipecompile.partitioners.dp.down_sets import MAX_PAIRS, cut_down_sets, enumerate_down_sets
from pipecompile.partitioners.dp.traffic_order import least_traffic_order
from pipecompile.partitioners.incumbent import SolverState
from pipecompile.partitioners.local_search import descend

__all__ = [
    "candidate_orders",
    "cut_all_down_sets",
    "cut_candidate_orders",
    "cut_down_sets_below",
    "order_by_key",
    "polish",
]

Priority = Callable[[int, int], float]
"""(cluster, number of clusters placed when it became ready) -> priority; the least is placed first."""

FIRST_CAP = 1.25
"""The first cap on the bottleneck of a long order, as a multiple of the lower bound; doubled until a cut exists."""

MAX_RECOUNTS = 4
"""Times that the receivers of tensors are counted anew for an order."""

SHORT_ORDER = 1000
"""Clusters up to which an order is cut without a cap."""


def cut_candidate_orders(state: SolverState, deadline: float) -> None:
    """Offer the best cut of every candidate order. Stop if the bound is met or no other order exists, at the deadline with a cut, and
    in half of the time if no cut of long orders fits in memory.
    """
    clusters, machine, half = state.clusters, state.machine, (state.begin + state.deadline) / 2
    for order in candidate_orders(clusters, state.ranges):
        cap = inf if len(order) <= SHORT_ORDER else FIRST_CAP * state.lower_bound
        cap = state.bottleneck if state.assignment is not None else cap
        while (cut := cut_order(clusters, machine, order, state.ranges, cap)) is None and cap < sum(clusters.time):
            if state.assignment is not None:
                break
            cap *= 2
        if cut is not None:
            state.offer(cut, method="dp")
            _recount_receivers(state, order, cut, deadline)
        if state.assignment is not None and _is_exact(order, state):
            state.raise_bound(state.bottleneck, "dp")
        if state.assignment is not None and (not state.has_gap or monotonic() > deadline):
            return
        if len(order) > SHORT_ORDER and monotonic() > half:
            return


def _recount_receivers(state: SolverState, order: Sequence[int], cut: Sequence[int], deadline: float) -> None:
    """Offer cuts of an order in which a sender pays for as many receivers as in the cut before. Where every receiver is paid for,
    the program without counts takes a tensor that many stages consume for one that two consume.
    """
    clusters, machine = state.clusters, state.machine
    if machine.multicast or all(len(flow.consumers) == 1 for flow in clusters.flows):
        return
    silent = cut_order(replace(clusters, flows=()), machine, order, state.ranges)
    for start in (cut, silent):
        current = start
        for _ in range(MAX_RECOUNTS):
            if current is None or monotonic() > deadline or not state.has_gap:
                break
            state.offer(current, method="dp")
            copies = [
                max(1, len({current[c] for c in flow.consumers} - {current[flow.source]})) for flow in clusters.flows
            ]
            better = cut_order(clusters, machine, order, state.ranges, copies=copies)
            current = None if better == current else better


def _is_exact(order: Sequence[int], state: SolverState) -> bool:
    """Return whether the order is the only one, a chain, and its cut is charged exactly as the objective says."""
    machine, arcs = state.machine, set(state.clusters.arcs)
    sent_once = machine.multicast or all(len(flow.consumers) == 1 for flow in state.clusters.flows)
    exact_loads = sent_once and machine.is_one_to_one and machine.links is None
    return exact_loads and all(pair in arcs for pair in zip(order, order[1:], strict=False))


def polish(state: SolverState, deadline: float) -> None:
    """Improve the incumbent until neither local search nor the best cut of its own order does."""
    state.enter("moves")
    improved = state.assignment is not None
    while improved and state.assignment is not None and state.has_gap and monotonic() < deadline:
        improved = state.offer(descend(state.clusters, state.machine, state.assignment, state.ranges, deadline))
        order = order_by_key(state.clusters, state.assignment, state.ranges)
        cut = cut_order(state.clusters, state.machine, order, state.ranges, state.bottleneck)
        improved = (cut is not None and state.offer(cut)) or improved


def cut_all_down_sets(state: SolverState, deadline: float) -> None:
    """Find the optimum and prove it, if the graph has few down-sets and every stage is a device of its own. Only a small problem
    takes longer than the deadline.
    """
    state.enter("down-sets")
    if state.assignment is None or not state.machine.is_one_to_one or state.machine.links is not None:
        return
    target = state.target
    contracted = contract(state.clusters, state.machine, target)
    windows = compute_windows(contracted, state.machine, target, deadline)
    cut_down_sets_below(state, target, contracted, windows, deadline)


def cut_down_sets_below(
    state: SolverState,
    target: float,
    clusters: Clusters,
    windows: StageWindows,
    deadline: float,
    max_pairs: int = MAX_PAIRS,
) -> bool:
    """Cut over the down-sets within the windows of a target: offer the cut, raise the bound. Return False if there are too
    many down-sets, or too many to list before the deadline.
    """
    if not state.machine.is_one_to_one or state.machine.links is not None:
        return False
    down_sets = [] if windows.is_empty else enumerate_down_sets(clusters, windows, len(state.machine), deadline)
    if down_sets is None:
        return False
    result = (
        cut_down_sets(clusters, state.machine, down_sets, target, max_pairs, state.deadline)
        if down_sets
        else (None, inf)
    )
    if result is None:
        return False
    cut, bound = result
    if cut is not None:
        state.offer(cut, clusters, "dp")
    state.raise_bound(min(bound, target), "dp")
    return True


def candidate_orders(clusters: Clusters, ranges: StageRanges | None = None) -> Iterator[list[int]]:
    """Yield different good orders, each once: as numbered, by level, depth first, deepest first, with the least traffic; from either
    end.
    """
    predecessors, successors = _with_barriers(adjacency(clusters), ranges)
    seen: set[tuple[int, ...]] = set()
    for forward in (True, False):
        sources, sinks = (predecessors, successors) if forward else (successors, predecessors)
        for priority in _priorities(sources, sinks, forward=forward):
            order = _list_schedule(sources, sinks, priority, len(clusters))[:: 1 if forward else -1]
            if tuple(order) not in seen:
                seen.add(tuple(order))
                yield order
    if ranges is None and clusters.flows:
        for forward in (True, False):
            order = least_traffic_order(clusters, forward=forward)
            if tuple(order) not in seen:
                seen.add(tuple(order))
                yield order


def order_by_key(clusters: Clusters, key: Sequence[float], ranges: StageRanges | None = None) -> list[int]:
    """Return a topological order that places the ready cluster with the least key next."""
    predecessors, successors = _with_barriers(adjacency(clusters), ranges)
    return _list_schedule(predecessors, successors, lambda cluster, _: key[cluster], len(clusters))


def _with_barriers(graph: Adjacency, ranges: StageRanges | None) -> Adjacency:
    """Add one barrier per stage, numbered after the clusters: after all clusters before the stage, before all others."""
    if ranges is None:
        return graph
    predecessors, successors = graph
    earliest, latest = ranges
    n, n_stages = len(predecessors), 1 + max(latest, default=0)
    predecessors, successors = predecessors + [[] for _ in range(n_stages)], successors + [[] for _ in range(n_stages)]
    arcs = [(n + s, n + s + 1) for s in range(n_stages - 1)]
    arcs += [(v, n + latest[v] + 1) for v in range(n) if latest[v] + 1 < n_stages]
    arcs += [(n + earliest[v], v) for v in range(n) if earliest[v] > 0]
    for a, b in arcs:
        successors[a].append(b)
        predecessors[b].append(a)
    return predecessors, successors


def _priorities(
    sources: Sequence[Sequence[int]], sinks: Sequence[Sequence[int]], *, forward: bool
) -> tuple[Priority, ...]:
    depth = _depths(sources, sinks)

    def as_numbered(cluster: int, _placed: int) -> float:
        return cluster if forward else -cluster

    def by_level(cluster: int, _placed: int) -> float:
        return depth[cluster]

    def depth_first(_cluster: int, placed: int) -> float:
        return -placed

    def deepest_first(cluster: int, _placed: int) -> float:
        return -depth[cluster]

    return as_numbered, by_level, depth_first, deepest_first


def _list_schedule(
    sources: Sequence[Sequence[int]], sinks: Sequence[Sequence[int]], priority: Priority, n: int
) -> list[int]:
    """Return the first `n` vertices, the clusters, in order. A barrier is passed as soon as it is ready, and left out."""
    missing = [len(predecessors) for predecessors in sources]
    ready = [(priority(v, 0) if v < n else -inf, v) for v, count in enumerate(missing) if not count]
    heapify(ready)
    order: list[int] = []
    while ready:
        _, cluster = heappop(ready)
        if cluster < n:
            order.append(cluster)
        for consumer in sinks[cluster]:
            missing[consumer] -= 1
            if not missing[consumer]:
                heappush(ready, (priority(consumer, len(order)) if consumer < n else -inf, consumer))
    return order


def _depths(sources: Sequence[Sequence[int]], sinks: Sequence[Sequence[int]]) -> list[int]:
    """Return the length of the longest path to every cluster from the end where the order starts."""
    depth = [0] * len(sources)
    for cluster in _list_schedule(sources, sinks, lambda cluster, _: cluster, len(sources)):
        depth[cluster] = max((depth[source] + 1 for source in sources[cluster]), default=0)
    return depth
