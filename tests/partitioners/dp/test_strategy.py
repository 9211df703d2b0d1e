"""Each step of the strategy gives a legal cut, and none makes the incumbent worse; orders respect precedence."""

from __future__ import annotations

import itertools
from itertools import groupby, pairwise
from math import inf
from time import monotonic

import pytest
from hypothesis import given, settings
from partitioners.oracle import brute_force, legal_assignments, problems

from pipecompile.partitioners import Node, Problem, Tensor
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.constraints import stage_ranges
from pipecompile.partitioners.dp import strategy
from pipecompile.partitioners.dp.chain_partition import cut_order
from pipecompile.partitioners.dp.strategy import (
    candidate_orders,
    cut_all_down_sets,
    cut_candidate_orders,
    order_by_key,
    polish,
)
from pipecompile.partitioners.incumbent import GAP, SolverState
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import bottleneck
from pipecompile.partitioners.verify import verify_assignment


def searching(problem: Problem, n_stages: int) -> SolverState:
    return SolverState(coarsen(problem), Machine.of(problem, n_stages), monotonic(), 60.0, None)


@settings(max_examples=80, deadline=None)
@given(problems(constrained=False))
def test_each_step_is_between_the_step_before_and_the_optimum(case):
    optimum, _ = brute_force(*case)
    state, values = searching(*case), [inf]
    cut_candidate_orders(state, inf)
    for step in (lambda: polish(state, inf), lambda: cut_all_down_sets(state, inf)):
        values.append(state.bottleneck)
        step()
        if state.assignment is not None:
            verify_assignment(case[0], state.clusters.stage_by_node(state.assignment), case[1])
        assert optimum * (1 - 1e-9) <= state.bottleneck <= values[-1]
        assert state.lower_bound <= optimum * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(problems(multicast=True, direct=True, constrained=False))
def test_the_cut_over_all_down_sets_is_optimal_with_proof(case):
    state = searching(*case)
    cut_candidate_orders(state, inf)
    if state.assignment is not None:
        cut_all_down_sets(state, inf)
        optimum, _ = brute_force(*case)
        assert state.bottleneck == pytest.approx(optimum, rel=GAP)
        assert state.lower_bound == pytest.approx(optimum, rel=GAP)


@settings(max_examples=80, deadline=None)
@given(problems())
def test_orders_are_topological_and_distinct(case):
    clusters = coarsen(case[0])
    if not any(legal_assignments(*case)):
        return
    span = stage_ranges(clusters, case[1])
    result = [*candidate_orders(clusters, span), order_by_key(clusters, [0] * len(clusters), span)]
    assert len({tuple(order) for order in result[:-1]}) == len(result) - 1 >= 1
    for order in result:
        position = {cluster: number for number, cluster in enumerate(order)}
        assert sorted(order) == list(range(len(clusters)))
        assert all(position[a] < position[b] for a, b in clusters.arcs)
        for (a, last), (b, first) in itertools.product(*map(enumerate, reversed(span or ([], [])))):
            assert position[a] < position[b] or last >= first


def test_two_branches_are_walked_by_level_and_depth_first():
    #     ┌─▶ b ─▶ d ─┐
    #   a ┤           ├─▶ f
    #     └─▶ c ─▶ e ─┘
    pairs = ("ab", "ac", "bd", "ce", "df", "ef")
    clusters = coarsen(Problem(tuple(Node(x) for x in "abcdef"), precedence=tuple((p[0], p[1]) for p in pairs)))
    words = {"".join(clusters.members[v][0] for v in order) for order in candidate_orders(clusters)}
    assert {"abcdef", "abdcef"} <= words or {"abcdef", "acebdf"} <= words


def test_a_key_decides_where_precedence_does_not():
    clusters = coarsen(Problem(tuple(Node(x) for x in "abc"), precedence=(("b", "a"),)))
    key = [{"a": 0, "b": 2, "c": 1}[names[0]] for names in clusters.members]
    assert [clusters.members[v][0] for v in order_by_key(clusters, key)] == ["c", "b", "a"]


def test_receivers_are_counted_anew_where_each_is_paid_for():
    """Every node of a dense block consumes all before: counted once, a tensor that all stages consume looks as cheap as any other."""
    names = [f"v{i}" for i in range(40)]
    nodes = tuple(Node(name, 1.0) for name in names)
    tensors = tuple(Tensor(name, tuple(names[i + 1 :]), 0.2) for i, name in enumerate(names[:20]))
    problem = Problem((*nodes, Node("end", 1.0)), tuple(pairwise([*names, "end"])), tensors, multicast=False)
    clusters, machine = coarsen(problem), Machine.of(problem, 6)
    state = SolverState(clusters, machine, monotonic(), 10.0, None)
    cut_candidate_orders(state, monotonic() + 10.0)
    estimate = bottleneck(clusters, machine, cut_order(clusters, machine, range(41)))
    assert state.bottleneck < 0.95 * estimate


def test_an_order_with_the_least_traffic_finishes_a_tower_before_the_next():
    arcs = [(f"t{i}.{j}", f"t{i}.{j + 1}") for i in range(3) for j in range(4)]
    arcs += [("stem", f"t{i}.0") for i in range(3)] + [(f"t{i}.4", "head") for i in range(3)]
    names = ["stem", *(f"t{i}.{j}" for j in range(5) for i in range(3)), "head"]
    problem = Problem(
        tuple(Node(name, 1.0) for name in names), tuple(arcs), tuple(Tensor(a, (b,), 1.0) for a, b in arcs)
    )
    clusters = coarsen(problem)
    towers = [clusters.members[v][0].split(".")[0] for v in list(candidate_orders(clusters))[-1]]
    assert len(list(groupby(towers))) <= 6


def test_long_orders_that_do_not_fit_are_left_in_half_of_the_time(monkeypatch):
    """All orders were cut under ever larger caps, whatever the time."""
    nodes = tuple(Node(f"n{i}", 1.0, 10.0) for i in range(strategy.SHORT_ORDER + 1))
    problem = Problem(nodes, precedence=(("n0", "n9"), ("n2", "n5")), memory_limit=20.0)
    orders: list[tuple[int, ...]] = []
    monkeypatch.setattr(strategy, "cut_order", lambda clusters, machine, order, *rest: orders.append(tuple(order)))
    state = SolverState(coarsen(problem), Machine.of(problem, 2), monotonic() - 60.0, 60.0, None)
    state.raise_bound(500.0)
    cut_candidate_orders(state, state.begin + 6.0)
    assert len(set(orders)) == 1
