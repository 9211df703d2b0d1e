"""The bounds of an anchor never exceed the optimum, and reach it where a heavy cluster is alone in its stage."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from partitioners.oracle import brute_force, problems

from pipecompile.partitioners import Node, Problem, Tensor, partition
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.ilp.anchored_stages import anchor_bound, cut_bound
from pipecompile.partitioners.machine import Machine


@settings(max_examples=40, deadline=None)
@given(problems(memory=False, max_nodes=6))
def test_the_bound_is_below_the_optimum(case):
    optimum, _ = brute_force(*case)
    if optimum > 0:
        clusters, machine = coarsen(case[0]), Machine.of(*case)
        assert anchor_bound(clusters, machine, optimum, inf) <= optimum * (1 + 1e-6)
        assert cut_bound(clusters, machine, 0.0, 2 * optimum, inf) <= optimum * (1 + 1e-6)


def test_expensive_tensors_around_a_heavy_node_decide():
    #  a ══ 5 ══▶ b ══ 5 ══▶ c      b alone costs 10 + 5 + 5, with a neighbour 10 + 1 + 5, all in one stage 12
    nodes = (Node("a", 1.0), Node("b", 10.0), Node("c", 1.0))
    problem = Problem(
        nodes,
        precedence=(("a", "b"), ("b", "c")),
        tensors=(Tensor("a", ("b",), 5.0), Tensor("b", ("c",), 5.0)),
    )
    assert anchor_bound(coarsen(problem), Machine.of(problem, 8), 20.0, inf) == pytest.approx(12.0)
    assert cut_bound(coarsen(problem), Machine.of(problem, 8), 10.0, 20.0, inf) == pytest.approx(12.0)


def reader(count: int) -> Problem:
    """Return one operation that reads from many small ones, each of more work than its tensor takes to receive."""
    names = [f"r{i}" for i in range(count)]
    return Problem(
        (*(Node(name, 1.0 + 0.01 * i) for i, name in enumerate(names)), Node("heavy", 30.0)),
        precedence=tuple((name, "heavy") for name in names),
        tensors=tuple(Tensor(name, ("heavy",), 0.3) for name in names),
    )


def test_a_heavy_node_that_reads_much_is_proven_to_be_alone():
    problem = reader(40)
    assert cut_bound(coarsen(problem), Machine.of(problem, 8), 30.0, 50.0, inf) == pytest.approx(42.0)
    found = partition(problem, 8, time_limit=20.0, gap=0.0)
    assert (found.status, found.bottleneck) == ("optimal", pytest.approx(42.0))


def test_work_that_overlaps_with_tensors_is_not_added_to_them():
    #  heavy alone: 30 of work beside 12 of tensors; with overlap a stage takes the longer of the two
    problem = replace(reader(40), overlap=True)
    assert cut_bound(coarsen(problem), Machine.of(problem, 8), 20.0, 50.0, inf) == pytest.approx(30.0)


def test_no_anchor_is_tried_where_no_cluster_is_heavier_than_the_bound():
    problem = reader(40)
    assert cut_bound(coarsen(problem), Machine.of(problem, 8), 42.5, 50.0, inf) == 42.5
