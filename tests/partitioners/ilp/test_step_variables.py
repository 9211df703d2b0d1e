"""Step variables: monotone, in order, numbers where windows say so."""

from __future__ import annotations

from math import inf

import pytest

from pipecompile.partitioners.ilp.solver_backend import Linear, Mip
from pipecompile.partitioners.ilp.step_variables import Steps

ARCS = [(0, 1), (1, 2)]


def chain(first: list[int], last: list[int], apart: tuple[tuple[int, int], ...] = ()) -> tuple[Mip, Steps]:
    mip = Mip()
    steps = Steps(mip, first, last)
    steps.rise(range(3), range(-1, 1 + max(last)))
    steps.order(ARCS, apart, range(-1, 1 + max(last)))
    return mip, steps


def test_precedence_pushes_all_that_follows():
    mip, steps = chain([0] * 3, [2] * 3)
    mip.require(steps.inside(1, 2), 1.0)  # the second in the last stage: the third too
    late = steps.inside(0, 2) + steps.inside(1, 2) + steps.inside(2, 2)
    outcome = mip.minimise(late, 10.0)
    assert outcome.bound == pytest.approx(2.0)
    assert steps.stages(outcome.values)[1:] == [2, 2]
    assert steps.stages(outcome.values)[0] < 2


def test_pairs_apart_leave_room_between():
    mip, steps = chain([0] * 3, [2] * 3, apart=((0, 1), (1, 2)))
    assert steps.stages(mip.minimise(Linear(), 10.0).values) == [0, 1, 2]
    mip, steps = chain([0] * 3, [1] * 3, apart=((0, 1), (1, 2)))
    assert mip.minimise(Linear(), 10.0).bound == inf


def test_against_the_order_there_is_nothing():
    mip, steps = chain([0] * 3, [1] * 3)
    mip.require(steps.inside(0, 1), 1.0)
    mip.require(steps.inside(2, 0), 1.0)
    assert mip.minimise(Linear(), 10.0).bound == inf


def test_windows_fix_steps_and_leave_numbers():
    mip, steps = chain([0, 0, 1], [0, 1, 1])
    assert [steps.inside(*at).constant for at in ((0, 0), (0, 1), (2, 0), (2, 1))] == [1, 0, 0, 1]
    assert steps.may_be(1, 0)
    assert not steps.may_be(2, 0)
    assert mip.n_rows == len(mip.low) == 0  # the free step of the second is in no row,
    assert steps.stages([]) == [0, 1, 1]  # and may be anything
