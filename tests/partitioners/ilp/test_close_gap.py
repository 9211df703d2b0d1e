"""From any cut the exact search reaches the optimum, and without time it keeps what it has."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

import pytest
from hypothesis import given, settings
from partitioners.oracle import brute_force, legal_assignments, problems

from pipecompile.partitioners import Node, Problem
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.ilp.close_gap import close
from pipecompile.partitioners.incumbent import Search
from pipecompile.partitioners.machine import Stages
from pipecompile.partitioners.objective import bottleneck


def searching(problem: Problem, n_stages: int, seconds: float) -> Search:
    return Search(coarsen(problem), Stages.of(problem, n_stages), monotonic(), seconds, None)


@settings(max_examples=60, deadline=None)
@given(problems(memory=False))
def test_a_bad_cut_is_improved_to_the_optimum(case):
    problem, n_stages = case
    start = next(legal_assignments(problem, n_stages), None)
    if start is None:
        return
    search, (optimum, _) = searching(problem, n_stages, 60.0), brute_force(problem, n_stages)
    search.offer([start[names[0]] for names in search.clusters.members])
    close(search)
    assert search.value == pytest.approx(optimum, rel=2e-6)
    assert optimum * (1 - 2e-6) <= search.bound <= optimum * (1 + 1e-6)


def test_a_bound_is_as_sharp_after_a_very_bad_cut():
    nodes = tuple(Node(f"v{i}", time) for i, time in enumerate((0.0, 5.0, 7.0, 7.0, 7.0)))
    search = searching(Problem(nodes, multicast=False, speed=(2.0, 3.0, 0.5, 2.0)), 4, 60.0)
    search.offer([0] * len(nodes))
    close(search)
    assert 4.0 * (1 - 1e-6) <= search.bound <= search.value == 4.0


def test_without_time_the_cut_is_no_worse_and_the_bound_honest():
    problem = Problem.load(Path(__file__).parent / "reference" / "OperatorGraphs__resnet50_training.json")
    search = searching(problem, 6, 1e-3)
    search.offer([0] * len(search.clusters))
    close(search)
    assert search.value <= bottleneck(search.clusters, search.stages, [0] * len(search.clusters))
    assert 0 <= search.bound <= 263.035288602 * (1 + 1e-6)  # the published optimum
