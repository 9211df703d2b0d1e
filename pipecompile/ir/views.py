"""Views of data: a registry from type to what shows it, filled by `show/` when that is imported.

    show, when imported          register_html(Schedule, schedule_html)
    IPython, for a cell's value  schedule._repr_html_()  ->  html_of(schedule)
    show, when imported          register_writer("trace", timeline_trace)
    a user                       timeline.save("step.json")  ->  writer_of("trace")(timeline)

Data do not know their pictures. A type without a formatter has no HTML form, and a notebook shows its `repr`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pipecompile.errors import InputError

__all__ = ["html_of", "register_html", "register_writer", "writer_of"]

T = TypeVar("T")

_FORMATTERS: dict[type, Callable[[Any], str]] = {}
_WRITERS: dict[str, Callable[..., Any]] = {}


def register_html(kind: type[T], formatter: Callable[[T], str]) -> None:
    """Use `formatter` for the HTML form of all objects of type `kind`, instead of an earlier formatter."""
    _FORMATTERS[kind] = formatter


def html_of(subject: object) -> str | None:
    """Return the HTML form of `subject`, or None if its type has no formatter."""
    formatter = _FORMATTERS.get(type(subject))
    return None if formatter is None else formatter(subject)


def register_writer(name: str, writer: Callable[..., Any]) -> None:
    """Use `writer` for the view `name` of a timeline, instead of an earlier one."""
    _WRITERS[name] = writer


def writer_of(name: str) -> Callable[..., Any]:
    """Return the function that makes the view `name` of a timeline. Raise InputError before `pipecompile.show` is imported."""
    if name not in _WRITERS:
        raise InputError(f"no {name} of a timeline", why="the pictures are not loaded", hint="import pipecompile.show")
    return _WRITERS[name]
