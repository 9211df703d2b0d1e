"""Orders, polish and exhaust: each is legal, and none is worse than what was there."""

from __future__ import annotations

from math import inf
from time import monotonic

import pytest
from hypothesis import given, settings
from partitioners.oracle import brute_force, problems

from pipecompile.partitioners import Problem
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.dp.strategy import along_orders, exhaust, polish
from pipecompile.partitioners.incumbent import GAP, Search
from pipecompile.partitioners.machine import Stages
from pipecompile.partitioners.objective import verify_assignment


def searching(problem: Problem, n_stages: int) -> Search:
    return Search(coarsen(problem), Stages.of(problem, n_stages), monotonic(), 60.0, None)


@settings(max_examples=80, deadline=None)
@given(problems(steered=False))
def test_each_step_is_between_the_step_before_and_the_optimum(case):
    optimum, _ = brute_force(*case)
    search, values = searching(*case), [inf]
    along_orders(search, inf)
    for step in (lambda: polish(search, inf), lambda: exhaust(search)):
        values.append(search.value)
        step()
        if search.stage is not None:
            verify_assignment(case[0], search.clusters.stage_of(search.stage), case[1])
        assert optimum * (1 - 1e-9) <= search.value <= values[-1]
        assert search.bound <= optimum * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(problems(multicast=True, direct=True, steered=False))
def test_exhaust_proves_what_it_finds(case):
    search = searching(*case)
    along_orders(search, inf)
    if search.stage is not None:
        exhaust(search)
        optimum, _ = brute_force(*case)
        assert search.value == pytest.approx(optimum, rel=GAP)
        assert search.bound == pytest.approx(optimum, rel=GAP)
