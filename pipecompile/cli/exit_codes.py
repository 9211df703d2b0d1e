"""How a command ends: its report on stdout, or its error on stderr, and the exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout

import msgspec
import typer

from pipecompile.cli.option_names import as_options
from pipecompile.cli.report import Report
from pipecompile.errors import (
    InputError,
    PartitionError,
    PipecompileError,
    PlanError,
    ScheduleError,
    TraceError,
)
from pipecompile.show.table import render

__all__ = ["conclude", "exit_code", "working"]

_EXIT_CODES = ((TraceError, 3), (PartitionError, 4), (InputError, 2), (ScheduleError, 2), (PlanError, 2))


def conclude(as_json: bool, work: Callable[[], Report]) -> None:
    """Do the work and print what it returns. Raises typer.Exit with the code of a PipecompileError, or of the report."""
    try:
        with redirect_stdout(sys.stderr):
            report = work()
    except PipecompileError as error:
        told = as_options(str(error)) if exit_code(error) in (2, 4) else str(error)
        typer.echo(f"{type(error).__name__}: {told}", err=True)
        if as_json:
            code = {"code": error.code} if isinstance(error, TraceError) else {}
            _print_json({"error": type(error).__name__, "message": told, **code})
        raise typer.Exit(exit_code(error)) from None
    if as_json:
        _print_json(report.data)
    else:
        _print_text(report)
    if report.exit_code:
        raise typer.Exit(report.exit_code)


def exit_code(error: PipecompileError) -> int:
    """2 for what the user typed, 3 for a model that cannot be traced, 4 for a cut that does not exist, else 1."""
    return next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), 1)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show a spinner on stderr while the body runs, when somebody is looking at it."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield


def _print_json(data: object) -> None:
    sys.stdout.write(msgspec.json.encode(data).decode() + "\n")


def _print_text(report: Report) -> None:
    """Tables have colours and the terminal's width on a terminal; elsewhere they are plain text of 100 columns."""
    from rich.console import Console

    for number, block in enumerate(report.blocks):
        if number:
            print()
        if isinstance(block, str):
            print(block)
        elif sys.stdout.isatty():
            Console(highlight=False).print(block)
        else:
            print(render(block))
