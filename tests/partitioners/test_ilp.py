"""From any incumbent the integer program reaches the optimum, and without time it keeps the incumbent."""

from __future__ import annotations

from math import inf
from pathlib import Path
from time import monotonic

import pytest
from hypothesis import given, settings
from partitioners.oracle import brute_force, problems

from pipecompile.partitioners import Node, Problem
from pipecompile.partitioners.clusters import Stages, coarsen
from pipecompile.partitioners.ilp import improve
from pipecompile.partitioners.loads import bottleneck


@settings(max_examples=60, deadline=None)
@given(problems(memory=False))
def test_a_bad_incumbent_is_improved_to_the_optimum(case):
    clusters, stages = coarsen(case[0]), Stages.of(*case)
    optimum, _ = brute_force(*case)
    stage, bound = improve(clusters, stages, [0] * len(clusters), inf)
    assert bottleneck(clusters, stages, stage) == pytest.approx(optimum, rel=2e-6)
    assert optimum * (1 - 2e-6) <= bound <= optimum * (1 + 1e-6)


def test_a_bound_is_as_sharp_after_a_very_bad_incumbent():
    nodes = tuple(Node(f"v{i}", time) for i, time in enumerate((0.0, 5.0, 7.0, 7.0, 7.0)))
    problem = Problem(nodes, multicast=False, speed=(2.0, 3.0, 0.5, 2.0))
    clusters, stages = coarsen(problem), Stages.of(problem, 4)
    _, bound = improve(clusters, stages, [0] * len(clusters), inf)
    assert 4.0 * (1 - 1e-6) <= bound <= 4.0


def test_without_time_the_incumbent_stays_and_the_bound_is_honest():
    problem = Problem.load(Path(__file__).parent / "reference" / "OperatorGraphs__resnet50_training.json")
    clusters, stages = coarsen(problem), Stages.of(problem, 6)
    incumbent = [0] * len(clusters)
    stage, bound = improve(clusters, stages, incumbent, monotonic())
    assert stage == incumbent
    assert 0 <= bound <= 263.035288602 * (1 + 1e-6)  # the published optimum
