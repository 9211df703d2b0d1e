"""Coarse graphs lead to cuts that moves of single clusters do not find, and prove nothing."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partitioners.dp.test_alike_stages import state_of
from partitioners.dp.test_fewest_stages import optimum_of
from partitioners.dp.test_stage_candidates import graphs

from pipecompile.partitioners import Node, Problem, Tensor
from pipecompile.partitioners.dp import coarse_graphs, narrow_down_sets
from pipecompile.partitioners.dp.coarse_graphs import cut_coarse_graphs, recut_coarse_graphs
from pipecompile.partitioners.dp.strategy import cut_candidate_orders, polish


def cells(n_cells: int, n_branches: int, length: int) -> Problem:
    """Return cells that read the two before, of branches in parallel whose values join in a large one."""
    nodes, tensors = [Node("h0", 1.0), Node("h1", 1.0)], list[Tensor]()
    for c in range(2, n_cells + 2):
        joined = f"h{c}"
        for b in range(n_branches):
            before = f"h{c - 1 - b % 2}"
            for step in range(length):
                name = f"c{c}b{b}s{step}"
                nodes.append(Node(name, 0.2 + (7 * b + 3 * step) % 5 / 5))
                tensors.append(Tensor(before, (name,), 0.6 if step else 0.9))
                before = name
            tensors.append(Tensor(before, (joined,), 0.6))
        nodes.append(Node(joined, 0.2))
    merged: dict[str, Tensor] = {}
    for t in tensors:
        old = merged.get(t.source, t)
        merged[t.source] = Tensor(t.source, tuple(dict.fromkeys((*old.consumers, *t.consumers))), old.time)
    precedence = tuple((t.source, c) for t in merged.values() for c in t.consumers)
    return Problem(tuple(nodes), precedence, tuple(merged.values()), multicast=False)


def test_cells_of_parallel_branches_are_cut_better_than_by_moves(monkeypatch):
    state = state_of(cells(4, 6, 2), 5)
    monkeypatch.setattr(coarse_graphs, "GRAINS", (30,))
    monkeypatch.setattr(coarse_graphs, "MIN_CLUSTERS", 0)
    monkeypatch.setattr(narrow_down_sets, "N_KEPT", 300)
    cut_candidate_orders(state, inf)
    polish(state, inf)
    before, bound = state.bottleneck, state.lower_bound
    cut_coarse_graphs(state, inf)
    assert state.bottleneck < 0.95 * before
    assert state.lower_bound == bound


@settings(max_examples=40, deadline=None)
@given(graphs(), st.integers(2, 4))
def test_coarse_graphs_prove_nothing_and_their_cuts_are_legal(problem, n_stages):
    state, optimum = state_of(problem, n_stages), optimum_of(problem, n_stages)
    bound = state.lower_bound
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coarse_graphs, "FAR", 1.0)
        patch.setattr(coarse_graphs, "MIN_CLUSTERS", 0)
        patch.setattr(coarse_graphs, "GRAINS", (2, 3))
        patch.setattr(coarse_graphs, "MAX_FAILURES", 2)
        patch.setattr(narrow_down_sets, "MAX_WIDTH", 2)
        cut_coarse_graphs(state, inf)
        recut_coarse_graphs(state, inf)
    assert state.lower_bound == bound
    assert state.bottleneck >= optimum * (1 - 1e-9)
    assert all(state.assignment[a] <= state.assignment[b] for a, b in state.clusters.arcs)
