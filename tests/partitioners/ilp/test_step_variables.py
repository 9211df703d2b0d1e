"""Step variables: monotone, ordered, constant outside windows."""

from __future__ import annotations

from math import inf

import pytest

from pipecompile.partitioners.ilp.solver_backend import LinearExpr, Mip
from pipecompile.partitioners.ilp.step_variables import StepVariables

ARCS = [(0, 1), (1, 2)]


def chain(first: list[int], last: list[int], apart: tuple[tuple[int, int], ...] = ()) -> tuple[Mip, StepVariables]:
    mip = Mip()
    steps = StepVariables(mip, first, last)
    steps.add_monotonicity(range(3), range(-1, 1 + max(last)))
    steps.add_precedence(ARCS, apart, range(-1, 1 + max(last)))
    return mip, steps


def test_precedence_pushes_all_descendants():
    mip, steps = chain([0] * 3, [2] * 3)
    mip.add_row(steps.in_stage(1, 2), 1.0)  # the second in the last stage: the third too
    late = steps.in_stage(0, 2) + steps.in_stage(1, 2) + steps.in_stage(2, 2)
    outcome = mip.minimise(late, 10.0)
    assert outcome.bound == pytest.approx(2.0)
    assert steps.assignment(outcome.values)[1:] == [2, 2]
    assert steps.assignment(outcome.values)[0] < 2


def test_strict_pairs_are_in_different_stages():
    mip, steps = chain([0] * 3, [2] * 3, apart=((0, 1), (1, 2)))
    assert steps.assignment(mip.minimise(LinearExpr(), 10.0).values) == [0, 1, 2]
    mip, steps = chain([0] * 3, [1] * 3, apart=((0, 1), (1, 2)))
    assert mip.minimise(LinearExpr(), 10.0).bound == inf


def test_an_assignment_against_precedence_is_infeasible():
    mip, steps = chain([0] * 3, [1] * 3)
    mip.add_row(steps.in_stage(0, 1), 1.0)
    mip.add_row(steps.in_stage(2, 0), 1.0)
    assert mip.minimise(LinearExpr(), 10.0).bound == inf


def test_outside_windows_steps_are_constants():
    mip, steps = chain([0, 0, 1], [0, 1, 1])
    assert [steps.in_stage(*at).constant for at in ((0, 0), (0, 1), (2, 0), (2, 1))] == [1, 0, 0, 1]
    assert steps.is_possible(1, 0)
    assert not steps.is_possible(2, 0)
    assert mip.n_rows == len(mip.lower) == 0  # the free step of the second is in no row,
    assert steps.assignment([]) == [0, 1, 1]  # and may be anything
