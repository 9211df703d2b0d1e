"""Programs that decide a target, and the choice of their targets: a cut of an order with its copies counted, and filled stages.

lower bound ──┬──────┬──────────┬────────────┬──────── incumbent
              none   none       a cut        a cut
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

from pipecompile.partitioners.dp.counted_copies import counts_copies, cut_order_below
from pipecompile.partitioners.dp.stage_filling import StageFiller, can_fill, fill_below, narrowest
from pipecompile.partitioners.dp.strategy import candidate_orders
from pipecompile.partitioners.incumbent import SolverState
from pipecompile.partitioners.local_search import descend
from pipecompile.partitioners.objective import bottleneck

__all__ = ["cut_chain_with_copies", "fill_between"]

FIRST_STEP = 0.01
"""Distance of the first target of a chain from the lower bound, as a share of the incumbent; doubled until there is a cut. Low
targets are refuted quickly, while a target far above the optimum leaves many suffixes.
"""

NEAR = 0.004
"""Relative distance of targets at which filling ends: a cut between two near targets is left to local search."""

WEIGHTS = (1.0, 0.5)
"""Weights of tensors against work in the reach of a stage, one after the other."""

STRIDE = 0.7
"""Position of the next target between what was not reached (0) and the incumbent (1): a target that is missed costs all fillings."""

DESCENT_SECONDS, PROMISING = 0.3, 1.05
"""Most seconds of local search from a cut of filled stages, and the ratio to the incumbent up to which it is begun."""


def cut_chain_with_copies(state: SolverState, deadline: float) -> bool:
    """Find the optimum and prove it if the clusters are a chain and a sender pays for every receiver. Return whether
    that is so, and no target had too many suffixes.
    """
    clusters, arcs, order = state.clusters, set(state.clusters.arcs), range(len(state.clusters))
    is_chain = all(pair in arcs for pair in zip(order, order[1:], strict=False))
    if not is_chain or not state.has_gap or not counts_copies(clusters, state.machine, order):
        return False
    state.enter("orders")
    step, refuted = FIRST_STEP, True
    while state.has_gap and monotonic() < deadline:
        target = state.lower_bound + step * state.bottleneck if refuted else (state.lower_bound + state.bottleneck) / 2
        target = min(target, state.target)
        cut, is_proof = cut_order_below(clusters, state.machine, order, state.ranges, target, deadline)
        if cut is not None:
            state.offer(cut, method="dp")
            refuted = False
        elif is_proof:
            state.raise_bound(target, "dp")
            step *= 2
        else:
            return False
    return True


def fill_between(state: SolverState, deadline: float) -> None:
    """Fill stages up to targets between bound and incumbent, from either end, until targets are near each other."""
    if not state.has_gap or monotonic() > deadline or not can_fill(state.clusters, state.machine):
        return
    state.enter("filling")
    orders = list(candidate_orders(state.clusters))
    fillers = [
        StageFiller(state.clusters, narrowest(state.clusters, orders, forwards=side), forwards=side)
        for side in (True, False)
    ]
    for weight in WEIGHTS:
        low = state.lower_bound
        while state.bottleneck - low > NEAR * state.bottleneck and state.has_gap and monotonic() < deadline:
            target = low + STRIDE * (state.bottleneck - low)
            if not _fill_below(state, fillers, target, weight, deadline):
                low = target


def _fill_below(
    state: SolverState, fillers: Sequence[StageFiller], target: float, weight: float, deadline: float
) -> bool:
    """Offer cuts of stages filled up to a target. Return whether one of them is below it."""
    for filler in fillers:
        cut = fill_below(filler, state.machine, target, weight, deadline) if monotonic() < deadline else None
        if cut is None:
            continue
        if bottleneck(state.clusters, state.machine, cut) < PROMISING * state.bottleneck:
            end = min(deadline, monotonic() + DESCENT_SECONDS)
            state.offer(descend(state.clusters, state.machine, cut, state.ranges, end), method="dp")
        if state.bottleneck <= target:
            return True
    return False
