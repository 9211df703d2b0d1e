"""The bound from covers never exceeds the optimum, sees whole clusters and the tensors of every stage, and ends at the deadline."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from time import monotonic

import pytest
from hypothesis import given, settings
from partitioners.oracle import brute_force, leaves, legal_assignments, problems

from pipecompile.partitioners import Node, Problem, Tensor, partition
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.ilp.column_bound import column_bound
from pipecompile.partitioners.ilp.shared_capacity import capacity_bound
from pipecompile.partitioners.machine import Machine


@settings(max_examples=60, deadline=None)
@given(problems(max_nodes=6))
def test_the_bound_is_below_the_optimum(case):
    optimum, _ = brute_force(*case)
    if 0 < optimum < inf:
        clusters, machine = coarsen(case[0]), Machine.of(*case)
        stage_of = next(iter(legal_assignments(*case)))
        cut = [stage_of[names[0]] for names in clusters.members]
        for low, target in (
            (0.5 * optimum, 1.5 * optimum),
            (0.999 * optimum, optimum),
            (0.9 * optimum, 1.001 * optimum),
        ):
            assert column_bound(clusters, machine, cut, low, target, monotonic() + 5) <= optimum * (1 + 1e-6)


def bound(problem: Problem, n_stages: int, low: float, target: float, seconds: float = 20.0) -> float:
    clusters, machine = coarsen(problem), Machine.of(problem, n_stages)
    cut = [v * n_stages // len(clusters) for v in range(len(clusters))]
    return column_bound(clusters, machine, cut, low, target, monotonic() + seconds)


def test_whole_nodes_and_tensors_of_every_stage_are_seen():
    #  42 seconds in 4 stages, 10.5 each: some stage has six nodes, 12 seconds, and receives or sends for half a second
    problem = leaves(20, 0.5)
    assert capacity_bound(coarsen(problem), Machine.of(problem, 4), 20.0, inf) < 11.5
    assert bound(problem, 4, 10.5, 20.0) == pytest.approx(12.5, rel=2e-3)
    assert bound(problem, 4, 10.5, 12.0) == 12.0


def test_stages_hold_whole_nodes():
    #  five nodes of a second in two stages: one has three of them; in three stages of two each there is room
    problem = Problem(tuple(Node(f"n{i}", 1.0) for i in range(5)), precedence=(), tensors=())
    assert bound(problem, 2, 2.5, 2.9) == 2.9
    assert bound(problem, 2, 2.5, 3.1) <= 3.0
    assert bound(problem, 3, 1.0, 1.9) == 1.9
    assert bound(problem, 3, 1.0, 2.1) <= 2.0


def test_a_node_that_needs_another_one_beside_it_refutes_nothing():
    #  b alone receives for 5 seconds; with a it takes 2 in all
    problem = Problem(
        (Node("a", 1.0), Node("b", 1.0), Node("c", 1.9)),
        precedence=(("a", "b"), ("b", "c")),
        tensors=(Tensor("a", ("b",), 5.0),),
    )
    optimum = partition(problem, 2).bottleneck
    assert optimum == 2.0
    assert bound(problem, 2, 1.0, 3.0) <= optimum * (1 + 1e-6)


def test_an_ended_deadline_leaves_the_bound_as_it_was():
    assert bound(leaves(20, 0.5), 4, 10.5, 20.0, seconds=-1.0) == 10.5


def test_nothing_is_claimed_where_stages_differ_or_tensors_take_no_time_of_their_own():
    problem = leaves(8, 1.0)
    for other in ({"speed": (1.0, *(2.0,) * 8)}, {"overlap": True}, {"placement": (0, 0, *range(1, 8))}):
        assert bound(replace(problem, **other), 9, 1.0, 4.9) == 1.0
