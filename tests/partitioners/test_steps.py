"""Step variables, and an honest outcome of either solver."""

from __future__ import annotations

from math import inf

import pulp
import pytest

from pipecompile.partitioners import Node, Problem
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.steps import Outcome, run, steps

CHAIN = coarsen(Problem(tuple(Node(x) for x in "abc"), precedence=(("a", "b"), ("b", "c"), ("a", "c"))))


@pytest.fixture(params=["HiGHS", "CBC"])
def solver(request, monkeypatch):
    if request.param == "CBC":
        monkeypatch.setattr(pulp.HiGHS, "available", lambda self: False)
    return request.param


def test_precedence_pushes_all_that_follows(solver):
    made = steps(CHAIN, [(0, 2)] * 3, 3)
    made.model.setObjective(pulp.lpSum(made.inside(v, 2) for v in range(3)))
    made.require(made.inside(1, 2), 1.0)  # b in the last stage: c too
    outcome = run(made.model, 10.0)
    assert (outcome.found, outcome.done) == (True, True)
    assert outcome.bound == pytest.approx(2.0)
    assert made.stages()[1:] == [2, 2]
    assert made.stages()[0] < 2


def test_a_row_that_cannot_hold_makes_the_model_infeasible(solver):
    made = steps(CHAIN, [(0, 1)] * 3, 2)
    made.model.setObjective(made.inside(0, 1) + 0)
    made.require(made.inside(0, 1), 1.0)  # a last,
    made.require(made.inside(2, 0), 1.0)  # c first
    assert run(made.model, 10.0) == Outcome(found=False, done=True, bound=inf)


def test_windows_fix_steps_and_leave_numbers():
    made = steps(CHAIN, [(0, 0), (0, 1), (1, 1)], 2)
    assert [made.inside(0, 0), made.inside(0, 1), made.inside(2, 0), made.inside(2, 1)] == [1, 0, 0, 1]
    assert made.model.numVariables() == 0  # the free step of b is in no row,
    assert made.stages() == [0, 1, 1]  # and may be anything


def test_positive_is_a_number_when_all_terms_are():
    made = steps(CHAIN, [(0, 0), (0, 1), (1, 1)], 2)
    assert made.positive("x", [-1, 1, 0]) == 1
    assert made.positive("y", [-1, -2]) == 0
    assert isinstance(made.positive("z", [made.inside(1, 0)]), pulp.LpVariable)
