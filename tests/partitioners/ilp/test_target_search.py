"""From any cut the exact state reaches the optimum, and without time it keeps what it has."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

import pytest
from hypothesis import given, settings
from partitioners.oracle import brute_force, legal_assignments, problems

from pipecompile.partitioners import Node, Problem
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.ilp.target_search import close_gap
from pipecompile.partitioners.incumbent import SolverState
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import bottleneck


def searching(problem: Problem, n_stages: int, seconds: float) -> SolverState:
    return SolverState(coarsen(problem), Machine.of(problem, n_stages), monotonic(), seconds, None)


@settings(max_examples=60, deadline=None)
@given(problems(memory=False))
def test_a_bad_cut_is_improved_to_the_optimum(case):
    problem, n_stages = case
    start = next(legal_assignments(problem, n_stages), None)
    if start is None:
        return
    state, (optimum, _) = searching(problem, n_stages, 60.0), brute_force(problem, n_stages)
    state.offer([start[names[0]] for names in state.clusters.members])
    close_gap(state)
    assert state.bottleneck == pytest.approx(optimum, rel=2e-6)
    assert optimum * (1 - 2e-6) <= state.lower_bound <= optimum * (1 + 1e-6)


def test_a_bound_is_as_sharp_after_a_very_bad_cut():
    nodes = tuple(Node(f"v{i}", time) for i, time in enumerate((0.0, 5.0, 7.0, 7.0, 7.0)))
    state = searching(Problem(nodes, multicast=False, speed=(2.0, 3.0, 0.5, 2.0)), 4, 60.0)
    state.offer([0] * len(nodes))
    close_gap(state)
    assert 4.0 * (1 - 1e-6) <= state.lower_bound <= state.bottleneck == 4.0


def test_without_time_the_cut_is_no_worse_and_the_bound_valid():
    problem = Problem.load(Path(__file__).parents[1] / "reference" / "OperatorGraphs__resnet50_training.json")
    state = searching(problem, 6, 1e-3)
    state.offer([0] * len(state.clusters))
    close_gap(state)
    assert state.bottleneck <= bottleneck(state.clusters, state.machine, [0] * len(state.clusters))
    assert 0 <= state.lower_bound <= 263.035288602 * (1 + 1e-6)  # the published optimum
