"""Cut coarse graphs into stages that are all alike: the best cut along their narrowest down-sets, then moves of single clusters.

    graph ─▶ coarse graph ─▶ narrow down-sets ─▶ fewest stages below targets ─▶ cut ─▶ moves ─▶ incumbent
      ▲                                                                                            │
      ╰──────── merged within the stages of the incumbent, other tensors first each time ◀─────────╯

Cells of many parallel branches have too many down-sets to list them all, and at a boundary between stages many clusters change sides
together: moves of single clusters lead nowhere. Merged, each branch is a few clusters. Coarse graphs of several grains are cut, and
later random ones that have the incumbent among their cuts (iterated multilevel partitioning: Walshaw, "Multilevel refinement for
combinatorial optimisation problems", 2004).
"""

from __future__ import annotations

from random import Random
from time import monotonic

from pipecompile.partitioners.clusters import Clusters
from pipecompile.partitioners.dp.alike_stages import TargetBisection, has_alike_stages
from pipecompile.partitioners.dp.narrow_down_sets import list_narrow_down_sets
from pipecompile.partitioners.dp.reduced_graph import reduced
from pipecompile.partitioners.dp.strategy import polish
from pipecompile.partitioners.heavy_merging import merge_heavy_pairs
from pipecompile.partitioners.incumbent import SolverState

__all__ = ["cut_coarse_graphs", "recut_coarse_graphs"]

GRAINS = 100, 150, 200, 300
"""Coarse clusters of the largest size in the total work, one graph after the other."""

FAR = 1.2
"""Ratio of incumbent to lower bound above which coarse graphs are cut: tensors are a large part of a stage. Near the bound, filled
stages (`stage_filling.py`) are as good, in less time.
"""

MIN_CLUSTERS = 300
"""Clusters above which coarse graphs are cut: a smaller graph is no larger than they are."""

REACH, NEXT_REACH = 0.88, 0.97
"""The least target that is tried, as a share of the incumbent: for graphs of each grain, and for random ones."""

NEAR = 0.002
"""Relative distance of targets at which the search of a coarse graph ends: moves of single clusters do the rest."""

MAX_FAILURES = 6
"""Random graphs without a better cut after which the search ends."""


def cut_coarse_graphs(state: SolverState, deadline: float) -> None:
    """Offer cuts of one coarse graph of each grain, until the deadline."""
    for grain in GRAINS if _is_far(state) else ():
        if monotonic() < deadline and state.has_gap:
            coarse = merge_heavy_pairs(state.clusters, sum(state.clusters.time) / grain)
            _cut(state, coarse, REACH * state.bottleneck, deadline)


def recut_coarse_graphs(state: SolverState, deadline: float) -> None:
    """Offer cuts of random coarse graphs that have the incumbent among their cuts, until the deadline or until they bring nothing."""
    draw, failures = Random(0), 0
    while failures < MAX_FAILURES and monotonic() < deadline and _is_far(state):
        before, most = state.bottleneck, sum(state.clusters.time) / draw.choice(GRAINS[1:])
        _cut(state, merge_heavy_pairs(state.clusters, most, state.assignment, draw), NEXT_REACH * before, deadline)
        failures = 0 if state.bottleneck < before else failures + 1


def _is_far(state: SolverState) -> bool:
    """Return whether the incumbent is far from the bound, the graph large, and all stages alike."""
    is_far = state.assignment is not None and state.bottleneck > FAR * state.lower_bound
    is_large = len(state.clusters) > MIN_CLUSTERS and len(state.machine) > 1
    return is_far and is_large and state.has_gap and has_alike_stages(state)


def _cut(state: SolverState, coarse: Clusters, low: float, deadline: float) -> None:
    """Offer the best cut of a coarse graph along narrow down-sets, after moves of clusters. Targets begin at `low`."""
    state.enter("down-sets")
    graph = reduced(coarse, state.machine)
    listing = list_narrow_down_sets(graph.branches, len(state.machine), state.machine.speed[0], deadline)
    if listing is None:
        return
    search = SolverState(coarse, state.machine, state.begin, deadline - state.begin, None)
    search.assignment, search.bottleneck = [0] * len(coarse), state.bottleneck
    search.tolerance, search.lower_bound = max(state.tolerance, NEAR), max(state.lower_bound, low)
    rounds = TargetBisection.of(search, graph, listing, search.target, deadline)
    if rounds is None:
        return
    rounds.run(deadline)  # what it refutes is not a bound of the graph: many down-sets are missing
    if state.offer(search.assignment, coarse, "dp"):
        polish(state, deadline)
