"""Rows of programs, and correct results of both solvers."""

from __future__ import annotations

from math import inf
from time import monotonic

import pytest

from pipecompile.partitioners.ilp import solver_backend as module
from pipecompile.partitioners.ilp.solver_backend import LinearExpr, Mip, OutOfTimeError


@pytest.fixture(params=["HiGHS", "CBC"])
def solver(request, monkeypatch):
    if request.param == "CBC":
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    return request.param


def test_expressions_add_and_drop_terms_that_cancel():
    mip = Mip()
    x, y = mip.add_variable(), mip.add_variable()
    both = x * 2.0 + y - 3.0
    assert both.evaluate([1.0, 5.0]) == 4.0
    assert (both - x * 2.0).terms == y.terms
    assert both.terms == {0: 2.0, 1: 1.0}, "an operator leaves its operands alone"
    assert both.add(y, -1.0) is both
    assert both.terms == {0: 2.0}


def test_the_best_integers_are_found(solver):
    mip = Mip()
    x, y = mip.add_variable(0, 10, integer=True), mip.add_variable(0, 10, integer=True)
    mip.add_row(x * 2.0 + y * 3.0, 12.5)
    cost = x * 3.0 + y * 4.0 + 1.0
    best = mip.minimise(cost, 10.0)
    assert best.is_optimal
    assert best.bound == pytest.approx(cost.evaluate(best.values)) == pytest.approx(19.0)  # 2 and 3
    assert mip.minimise_relaxed([cost, x * -1.0], 10.0) == pytest.approx([1.0 + 4.0 * 12.5 / 3.0, -10.0])


def test_contradicting_rows_have_no_solution(solver):
    mip = Mip()
    x = mip.add_variable(integer=True)
    mip.add_row(x, 0.75)
    mip.add_row(0.25, x)
    assert mip.minimise_relaxed([x, x * -1.0], 10.0) == [inf, inf]
    outcome = mip.minimise(x, 10.0)
    assert (outcome.values, outcome.is_optimal, outcome.bound) == (None, True, inf)


def test_a_row_without_variables_is_dropped_or_stays_to_be_found(solver):
    mip = Mip()
    x = mip.add_variable()
    mip.add_row(x - x, -1.0)
    mip.add_row(x, 0.0)  # always
    assert mip.n_rows == 0
    mip.add_row(LinearExpr(1.0), 2.0)
    assert mip.minimise(x, 10.0).bound == inf


def test_a_maximum_of_constants_is_a_constant():
    mip = Mip()
    x = mip.add_variable()
    for terms, known in (
        ([LinearExpr(-1.0), LinearExpr(0.5)], 0.5),
        ([LinearExpr(-2.0)], 0.0),
        ([x, LinearExpr(1.0)], 1.0),
    ):
        term = mip.add_maximum(terms)
        assert (term.constant, term.terms) == (known, {})
    assert mip.add_maximum([x]).terms == {1: 1.0}
    assert mip.minimise(mip.add_maximum([x - 0.5, LinearExpr(0.25)]), 10.0).bound == pytest.approx(0.25)


def hard() -> tuple[Mip, LinearExpr]:
    """Return a program that takes minutes: a subset of 50 numbers whose sum is as near as possible to half of the total."""
    mip, total = Mip(), LinearExpr()
    numbers = [(7919 * i * i + 104729 * i) % 99991 for i in range(1, 51)]
    for number in numbers:
        total.add(mip.add_variable(integer=True), number / 1000)
    off = mip.add_variable(0.0, inf)
    mip.add_row(off, total - sum(numbers) / 2000.0 + 1e-4 / 3)
    mip.add_row(off, total * -1.0 + sum(numbers) / 2000.0 + 1e-4 / 3)
    return mip, off


def test_the_callback_is_called_and_the_time_limit_is_kept():
    mip, off = hard()
    calls: list[tuple[float, float]] = []
    outcome = mip.minimise(off, 0.5, callback=lambda value, bound: calls.append((value, bound)))
    assert calls
    assert all(bound <= value for value, bound in calls)
    assert not outcome.is_optimal


def write_rows(mip: Mip) -> None:
    x = mip.add_variable(0.0, 9.0)
    for _ in range(module.ROWS_PER_CHECK):
        mip.add_row(x, 1.0)


def test_a_program_that_is_not_written_by_the_deadline_is_given_up():
    mip = Mip(deadline=monotonic())
    with pytest.raises(OutOfTimeError):
        write_rows(mip)
    assert mip.n_rows < module.ROWS_PER_CHECK
