"""Cuts into stages that are alike are optimal, and their bounds are bounds."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partitioners.dp.test_fewest_stages import optimum_of
from partitioners.dp.test_stage_candidates import graphs
from partitioners.oracle import brute_force, problems

from pipecompile.partitioners import Node, Problem, Tensor, partition
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.dp import reduced_graph
from pipecompile.partitioners.dp.alike_stages import cut_alike_stages, has_alike_stages
from pipecompile.partitioners.dp.reduced_graph import reduced
from pipecompile.partitioners.ilp.feasibility import find_fitting_cut
from pipecompile.partitioners.incumbent import SolverState
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.solver import trivial_lower_bound


def state_of(problem: Problem, n_stages: int) -> SolverState:
    clusters = coarsen(problem)
    state = SolverState(clusters, Machine.of(problem, n_stages), 0.0, inf, None)
    state.offer([0] * len(clusters))
    state.raise_bound(trivial_lower_bound(clusters, state.machine))  # so that limits rise
    return state


@settings(max_examples=300, deadline=None)
@given(graphs(), st.integers(2, 4))
def test_cuts_are_optimal_where_the_reduced_graph_is_exact(problem, n_stages):
    state, optimum = state_of(problem, n_stages), optimum_of(problem, n_stages)
    cut_alike_stages(state, 1e-3, inf, inf)
    assert state.lower_bound <= optimum * (1 + 1e-9)
    assert state.bottleneck >= optimum * (1 - 1e-9)
    assert all(state.assignment[a] <= state.assignment[b] for a, b in state.clusters.arcs)
    if reduced(state.clusters, state.machine).is_exact:
        assert state.bottleneck == pytest.approx(optimum)
        assert not state.has_gap


@st.composite
def chains_with_tables(draw: st.DrawFn) -> Problem:
    """Draw a chain, and tables, views and noise beside it that read each other and are read by it."""
    chain = [f"m{i}" for i in range(draw(st.integers(3, 4)))]
    extras = [f"e{i}" for i in range(draw(st.integers(2, 4)))]
    nodes = [Node(name, float(draw(st.integers(0, 5)))) for name in chain]
    nodes += [Node(name, draw(st.sampled_from((0.0, 0.0, 0.1, 0.3, 1.0)))) for name in extras]
    readers = {name: chain[i + 1 : i + 1 + draw(st.integers(1, 2))] for i, name in enumerate(chain)}
    for i, name in enumerate(extras):
        readers[name] = [one for one in (*extras[i + 1 :], *chain) if draw(st.integers(0, 2)) == 0]
    tensors = []
    for name, names in readers.items():
        parts = [tuple(names)] if draw(st.booleans()) else [(one,) for one in names]
        tensors += [Tensor(name, part, draw(st.sampled_from((0.0, 0.2, 0.5, 1.0)))) for part in parts if part]
    return Problem(tuple(nodes), tuple((t.source, c) for t in tensors for c in t.consumers), tuple(tensors),
                   multicast=draw(st.booleans()))  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(chains_with_tables(), st.integers(2, 3), st.sampled_from((0.3, 5.0)))
def test_what_is_left_out_of_a_graph_never_makes_a_bound_too_high_or_a_cut_illegal(problem, n_stages, share):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduced_graph, "LOOSE_SHARE", share)
        patch.setattr(reduced_graph, "BRANCH_SHARE", share)
        state, optimum = state_of(problem, n_stages), optimum_of(problem, n_stages)
        cut_alike_stages(state, 1e-3, inf, inf)
    assert state.lower_bound <= optimum * (1 + 1e-9)
    assert state.bottleneck >= optimum * (1 - 1e-9)
    assert all(state.assignment[a] <= state.assignment[b] for a, b in state.clusters.arcs)


@settings(max_examples=100, deadline=None)
@given(problems(direct=True, constrained=False))
def test_memory_and_recomputation_are_kept_by_the_cut_and_left_out_by_the_bound(case):
    problem, n_stages = case
    optimum, _ = brute_force(problem, n_stages)
    if optimum < inf:
        state = SolverState(coarsen(problem), Machine.of(problem, n_stages), 0.0, inf, None)
        state.offer(find_fitting_cut(state.clusters, state.machine, inf))
        cut_alike_stages(state, 1e-3, inf, inf)
        assert state.lower_bound <= optimum * (1 + 1e-9)
        assert state.bottleneck >= optimum * (1 - 1e-9)


def test_a_limit_that_does_not_bind_changes_nothing():
    nodes = tuple(Node(str(i), 1.0 + i % 3, bytes=1.0) for i in range(12))
    arcs = tuple((str(i), str(i + 1)) for i in range(11))
    tensors = tuple(Tensor(a, (b,), 0.1) for a, b in arcs)
    problem = Problem(nodes, arcs, tensors, memory_limit=5.0, in_flight=(3.0, 2.0, 1.0))
    state = state_of(replace(problem, memory_limit=100.0), 3)
    cut_alike_stages(state, 1e-3, inf, inf)
    assert not state.has_gap
    tight = SolverState(state.clusters, Machine.of(problem, 3), 0.0, inf, None)
    tight.offer(find_fitting_cut(tight.clusters, tight.machine, inf))
    cut_alike_stages(tight, 1e-3, inf, inf)
    assert tight.lower_bound == pytest.approx(state.bottleneck, rel=1e-5)


def test_a_table_is_computed_before_its_reader_where_that_is_better():
    nodes = (Node("a", 2.0), Node("b", 4.0), Node("table", 2.0))
    tensors = (Tensor("a", ("b",), 0.5), Tensor("table", ("b",), 0.5))
    problem = Problem(nodes, (("a", "b"), ("table", "b")), tensors, multicast=False)
    state = state_of(problem, 2)
    cut_alike_stages(state, 1e-3, inf, inf)
    assert state.bottleneck == pytest.approx(5.0)  # the table before its reader: 2 + 2 + 1 and 4 + 1; with it 6.5
    assert not state.has_gap


def test_residual_blocks_are_cut_optimally_where_each_receiver_is_paid_for():
    nodes, arcs, tensors = [Node("b0", 1.0)], [], []
    for i in range(40):
        before, conv, after = f"b{i}", f"c{i}", f"b{i + 1}"
        nodes += [Node(conv, 3.0 + i % 3), Node(after, 1.0)]
        arcs += [(before, conv), (before, after), (conv, after)]
        tensors += [Tensor(before, (conv, after), 0.5), Tensor(conv, (after,), 0.25)]
    problem = Problem(tuple(nodes), tuple(arcs), tuple(tensors), multicast=False)
    state = state_of(problem, 16)
    cut_alike_stages(state, 1e-3, inf, inf)
    assert not state.has_gap
    assert state.bottleneck == pytest.approx(state.lower_bound)
    assert state.bottleneck <= partition(problem, 16, method="ilp", time_limit=2.0).bottleneck + 1e-9


def test_stages_that_differ_are_left_to_others():
    nodes = (Node("a", 1.0, 1.0), Node("b", 1.0, 1.0))
    alike = Problem(nodes, (("a", "b"),), (Tensor("a", ("b",), 0.1),))
    assert has_alike_stages(state_of(alike, 2))
    for problem in (
        replace(alike, speed=(1.0, 2.0)),
        replace(alike, placement=(0, 0)),
        replace(alike, overlap=True),
        replace(alike, pins={"a": 0}),
        replace(alike, links=((0.0, 2.0), (1.0, 0.0))),
        replace(alike, precedence=()),  # b can come before a, which sends to it
    ):
        state = state_of(problem, 2)
        assert not has_alike_stages(state)
        before = state.bottleneck
        cut_alike_stages(state, 1e-3, inf, inf)
        assert state.bottleneck == before


def test_a_bound_of_zero_ends_the_search():
    nodes = tuple(Node(name, 0.0) for name in "abc")
    tensors = (Tensor("a", ("b", "c"), 1.0), Tensor("b", ("c",), 1.0))
    problem = Problem(nodes, (("a", "b"), ("a", "c"), ("b", "c")), tensors, multicast=False)
    state = state_of(problem, 3)
    state.assignment, state.bottleneck = [0, 1, 2], 3.0
    cut_alike_stages(state, 1e-3, inf, inf)
    assert state.bottleneck == 0.0


def test_counters_of_batch_norms_do_not_multiply_the_down_sets():
    chain = tuple(Node(f"v{i}", 1.0 + i % 5) for i in range(60))
    counters = tuple(Node(f"n{i}", 0.02) for i in range(60))
    arcs = tuple((f"v{i}", f"v{i + 1}") for i in range(59))
    problem = Problem((*chain, *counters), arcs, tuple(Tensor(a, (b,), 0.1) for a, b in arcs))
    state = state_of(problem, 8)
    cut_alike_stages(state, 1e-3, inf, inf)
    assert state.bottleneck - state.lower_bound <= 1e-3 * state.bottleneck


def test_a_bound_counts_a_part_of_a_table_as_a_part():
    times = {"m0": 2.0, "m1": 2.0, "m2": 5.0, "e0": 0.0, "e1": 1.0, "e2": 0.3}
    tensors = tuple(
        Tensor(source, (reader,), seconds)
        for source, reader, seconds in (
            ("m0", "m1", 0.2), ("m1", "m2", 1.0), ("e0", "e1", 0.5), ("e0", "e2", 1.0), ("e1", "m1", 0.2), ("e2", "m1", 1.0), ("e2", "m2", 0.5),
        )
    )  # fmt: skip
    nodes = tuple(Node(name, seconds) for name, seconds in times.items())
    problem = Problem(nodes, tuple((t.source, t.consumers[0]) for t in tensors), tensors, multicast=False)
    state, optimum = state_of(problem, 2), optimum_of(problem, 2)
    cut_alike_stages(state, 1e-3, inf, inf)
    assert state.lower_bound <= optimum * (1 + 1e-9)
    assert optimum <= state.bottleneck * (1 + 1e-9)
