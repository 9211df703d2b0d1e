"""Context variables (`contextvars`), restored after a run that is not the user's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Any

__all__ = ["context_variables_restored"]


@contextmanager
def context_variables_restored(values: Iterable[Any]) -> Iterator[list[ContextVar[Any]]]:
    """Give each context variable among these values the value from before when the block ends. After it, the list has those that had
    changed.

    A variable that had neither a value nor a default before keeps its new value.
    """
    before, changed = copy_context(), list[ContextVar[Any]]()
    variables = [value for value in values if isinstance(value, ContextVar)]
    try:
        yield changed
    finally:
        now = copy_context()
        for variable in dict.fromkeys(variables):
            if now.get(variable, variable) is not before.get(variable, variable):
                changed.append(variable)
                variable.set(before[variable]) if variable in before else _set_default(variable)


def _set_default(variable: ContextVar[Any]) -> None:
    """Give a variable its default, if it has one."""
    try:
        variable.set(Context().run(variable.get))
    except LookupError:
        return
