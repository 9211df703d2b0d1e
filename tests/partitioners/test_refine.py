"""Descent never makes a cut worse or illegal, and finds the move that helps."""

from __future__ import annotations

from math import inf
from time import monotonic

from hypothesis import given, settings
from partitioners.oracle import problems

from pipecompile.partitioners import Node, Problem
from pipecompile.partitioners.clusters import Stages, coarsen
from pipecompile.partitioners.loads import bottleneck
from pipecompile.partitioners.refine import refine


@settings(max_examples=100, deadline=None)
@given(problems())
def test_refined_is_legal_and_no_worse(case):
    clusters, stages = coarsen(case[0]), Stages.of(*case)
    start = [len(stages) - 1] * len(clusters)
    stage = refine(clusters, stages, start, inf)
    assert all(stage[a] <= stage[b] for a, b in clusters.arcs)
    assert bottleneck(clusters, stages, stage) <= bottleneck(clusters, stages, start)


def test_a_boundary_cluster_moves_and_a_passed_deadline_moves_nothing():
    problem = Problem(tuple(Node(x, 1.0) for x in "abcd"), precedence=(("a", "b"), ("b", "c"), ("c", "d")))
    clusters, stages = coarsen(problem), Stages.of(problem, 2)
    assert refine(clusters, stages, [0, 0, 0, 1], inf) == [0, 0, 1, 1]
    assert refine(clusters, stages, [0, 0, 0, 1], monotonic() - 1) == [0, 0, 0, 1]
