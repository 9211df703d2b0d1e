"""Context variables have their values from before a run that is not the user's own."""

from __future__ import annotations

from contextvars import ContextVar

from pipecompile.tracing.state.context_variables import context_variables_restored

WITH_DEFAULT: ContextVar[int] = ContextVar("WITH_DEFAULT", default=1)
WITHOUT: ContextVar[int] = ContextVar("WITHOUT")


def test_variables_that_are_named_are_restored():
    WITH_DEFAULT.set(2)
    with context_variables_restored([WITH_DEFAULT, "other", WITHOUT]) as changed:
        WITH_DEFAULT.set(3)
    assert (WITH_DEFAULT.get(), changed) == (2, [WITH_DEFAULT])
    with context_variables_restored([WITHOUT]) as changed:
        WITH_DEFAULT.set(4)
    assert (WITH_DEFAULT.get(), changed) == (4, [])


def test_a_variable_without_a_value_gets_its_default_and_stays_as_it_is_without_one():
    fresh: ContextVar[int] = ContextVar("fresh", default=7)
    with context_variables_restored([fresh, WITHOUT]) as changed:
        fresh.set(8)
        WITHOUT.set(9)
    assert (fresh.get(), WITHOUT.get(), changed) == (7, 9, [fresh, WITHOUT])
