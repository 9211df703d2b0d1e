"""HTML forms of data for notebooks: a registry from type to formatter.

    show, when imported          register_html(Schedule, schedule_html)
    IPython, for a cell's value  schedule._repr_html_()  ->  html_of(schedule)

Data do not know their pictures. A type without a formatter has no HTML form, and a notebook shows its `repr`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["html_of", "register_html"]

T = TypeVar("T")

_FORMATTERS: dict[type, Callable[[Any], str]] = {}


def register_html(kind: type[T], formatter: Callable[[T], str]) -> None:
    """Use `formatter` for the HTML form of all objects of type `kind`, instead of an earlier formatter."""
    _FORMATTERS[kind] = formatter


def html_of(subject: object) -> str | None:
    """Return the HTML form of `subject`, or None if its type has no formatter."""
    formatter = _FORMATTERS.get(type(subject))
    return None if formatter is None else formatter(subject)
