"""Chains with several receivers are solved with proof; filled stages improve the incumbent and never break it."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf
from time import monotonic

import pytest
from hypothesis import given, settings
from partitioners.oracle import brute_force, dense_blocks, problems

from pipecompile.partitioners import Node, Problem, Tensor, partition
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.dp.strategy import cut_candidate_orders
from pipecompile.partitioners.dp.target_programs import cut_chain_with_copies, fill_between
from pipecompile.partitioners.incumbent import SolverState
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.verify import verify_assignment


def begun(problem: Problem, n_stages: int) -> SolverState:
    state = SolverState(coarsen(problem), Machine.of(problem, n_stages), monotonic(), 60.0, None)
    cut_candidate_orders(state, inf)
    return state


@settings(max_examples=80, deadline=None)
@given(dense_blocks())
def test_a_dense_block_is_solved_with_proof(case):
    problem, n_stages = replace(case[0], multicast=False), case[1]
    state = begun(problem, n_stages)
    cut_chain_with_copies(state, inf)
    optimum = brute_force(problem, n_stages)[0]
    assert state.lower_bound <= optimum * (1 + 1e-9)
    if any(len(flow.consumers) > 1 and flow.time for flow in state.clusters.flows):
        assert not state.has_gap
        assert state.bottleneck == pytest.approx(optimum, rel=1e-6)


def test_a_chain_that_costs_nothing_but_what_pins_let_cross_is_solved():
    names = ["a", "b", "c", "d"]
    tensors = (Tensor("a", ("b", "d"), 1.0), Tensor("b", ("c",), 2.0), Tensor("c", ("d",), 2.0))
    pairs = tuple(zip(names, names[1:], strict=False))
    problem = Problem(tuple(map(Node, names)), pairs, tensors, multicast=False, pins={"a": 0, "d": 2})
    result = partition(problem, 3, gap=0)
    assert result.status == "optimal"
    assert result.bottleneck == pytest.approx(brute_force(problem, 3)[0])


def test_a_long_dense_network_is_proven():
    draw = random.Random(0)
    names = [f"v{i}" for i in range(160)]
    nodes = tuple(Node(name, draw.uniform(1.0, 3.0)) for name in names)
    end = lambda i: (i // 40 + 1) * 40  # noqa: E731
    tensors = tuple(
        Tensor(a, tuple(names[i + 1 : max(end(i) + 1, i + 2)]), draw.uniform(0.05, 0.2))
        for i, a in enumerate(names[:-1])
    )
    problem = Problem(nodes, tuple(zip(names, names[1:], strict=False)), tensors, multicast=False)
    phases: set[str] = set()
    result = partition(problem, 8, time_limit=60.0, gap=0, progress=lambda report: phases.add(report.phase))
    assert (result.status, result.method) == ("optimal", "dp")
    assert phases == {
        "orders",
        "down-sets",
    }  # what counts receivers once, and bounds from single stages, took half of the time before


@settings(max_examples=60, deadline=None)
@given(problems(constrained=False))
def test_filling_leaves_a_legal_cut_and_a_true_bound(case):
    optimum = brute_force(*case)[0]
    state = begun(*case)
    if state.assignment is None:
        return
    before = state.bottleneck
    fill_between(state, inf)
    assert optimum * (1 - 1e-9) <= state.bottleneck <= before
    assert state.lower_bound <= optimum * (1 + 1e-9)
    verify_assignment(case[0], state.clusters.stage_by_node(state.assignment), case[1], None)


def cells(count: int) -> Problem:
    """Return cells of five branches, each of which reads the two cells before."""
    draw, nodes, pairs, readers = random.Random(1), [Node("in", 1.0)], [], {"in": []}
    before, last = "in", "in"
    for c in range(count):
        ends = []
        for b in range(5):
            source = (before, last)[b % 2]
            for i in range(4):
                name = f"c{c}b{b}n{i}"
                nodes.append(Node(name, draw.uniform(0.5, 2.0)))
                pairs.append((source, name))
                source = name
            ends.append(source)
        nodes.append(Node(f"c{c}", 0.3))
        pairs += [(end, f"c{c}") for end in ends]
        before, last = last, f"c{c}"
    for a, b in pairs:
        readers.setdefault(a, []).append(b)
    tensors = tuple(Tensor(a, tuple(dict.fromkeys(bs)), 0.8) for a, bs in readers.items() if bs)
    return Problem(tuple(nodes), tuple(dict.fromkeys(pairs)), tensors, multicast=False)


def test_cells_are_cut_better_by_filled_stages_than_along_orders():
    state = begun(cells(8), 6)
    before = state.bottleneck
    fill_between(state, monotonic() + 20.0)
    assert state.bottleneck < 0.97 * before
