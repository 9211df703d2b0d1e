"""Each step of the strategy gives a legal cut, and none makes the incumbent worse."""

from __future__ import annotations

from math import inf
from time import monotonic

import pytest
from hypothesis import given, settings
from partitioners.oracle import brute_force, problems

from pipecompile.partitioners import Problem
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.dp.strategy import cut_all_down_sets, cut_candidate_orders, polish
from pipecompile.partitioners.incumbent import GAP, SolverState
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.verify import verify_assignment


def searching(problem: Problem, n_stages: int) -> SolverState:
    return SolverState(coarsen(problem), Machine.of(problem, n_stages), monotonic(), 60.0, None)


@settings(max_examples=80, deadline=None)
@given(problems(constrained=False))
def test_each_step_is_between_the_step_before_and_the_optimum(case):
    optimum, _ = brute_force(*case)
    state, values = searching(*case), [inf]
    cut_candidate_orders(state, inf)
    for step in (lambda: polish(state, inf), lambda: cut_all_down_sets(state)):
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
        cut_all_down_sets(state)
        optimum, _ = brute_force(*case)
        assert state.bottleneck == pytest.approx(optimum, rel=GAP)
        assert state.lower_bound == pytest.approx(optimum, rel=GAP)
