"""The end of a command: its report on stdout, or its error on stderr, and the exit code."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import TextIO

import msgspec
import typer

from pipecompile.cli.command_report import CommandReport
from pipecompile.cli.option_names import as_options
from pipecompile.cli.out_folder import check_folder
from pipecompile.errors import (
    InputError,
    PartitionError,
    PipecompileError,
    PlanError,
    ScheduleError,
    TraceError,
    VerifyError,
)
from pipecompile.show.table import render

__all__ = ["conclude", "exit_code", "faults_of_file"]

_EXIT_CODES = ((TraceError, 3), (PartitionError, 4), (InputError, 2), (ScheduleError, 2), (PlanError, 2))

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


def conclude(as_json: bool, work: Callable[[], CommandReport], out: Path | None = None) -> None:
    """Print the report that `work` returns. Raise typer.Exit with the code of its PipecompileError, or of the report.

    `out` is the folder that the work writes; it is checked first.
    """
    try:
        with redirect_stdout(sys.stderr), _warnings_as_lines():
            if out is not None:
                check_folder(out)
            report = work()
    except PipecompileError as error:
        message = as_options(str(error)) if exit_code(error) in (2, 4) else str(error)
        typer.echo(f"{type(error).__name__}: {message}", err=True)
        if as_json:
            code = {"code": error.code} if isinstance(error, TraceError) else {}
            with _stdout_in_one_line():
                _print_json({"error": type(error).__name__, "message": message, **code})
        raise typer.Exit(exit_code(error)) from None
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None
    with _stdout_in_one_line():
        _print_json(report.data) if as_json else _print_text(report)
    if report.exit_code:
        raise typer.Exit(report.exit_code)


@contextmanager
def _stdout_in_one_line() -> Iterator[None]:
    """Raise typer.Exit(1) with one line for a report that cannot be written: a full disk. A reader that has gone is typer's."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        with suppress(OSError):  # nor can what is left be written at the end of the process
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        typer.echo(f"OSError: the report cannot be written: {error.strerror or error}", err=True)
        raise typer.Exit(1) from None


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Show our warnings like errors, with options for keywords: no line of a user's file made them."""
    show = warnings.showwarning

    def show_line(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if category.__module__.startswith("pipecompile"):
            typer.echo(f"{category.__name__}: {as_options(str(message))}", err=True)
        else:
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = show_line
    try:
        yield
    finally:
        warnings.showwarning = show


@contextmanager
def faults_of_file(path: object) -> Iterator[None]:
    """Mark a VerifyError as a fault of the file if the file holds a schedule or a program. A fault in our own program is a failure."""
    try:
        yield
    except VerifyError as error:
        if str(path).endswith((".csv", ".txt")):
            error.file = str(path)
        raise


def exit_code(error: PipecompileError) -> int:
    """Return 2 for wrong usage, 3 for a model that cannot be traced, 4 if no cut fits, 5 for a pipeline in a file with a fault, else 1."""
    if isinstance(error, VerifyError) and error.file:
        return 5
    return next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), 1)


def _print_json(data: object) -> None:
    sys.stdout.write(msgspec.json.encode(data).decode() + "\n")


def _print_text(report: CommandReport) -> None:
    """Print blocks. Tables have colours and the terminal's width on a terminal, elsewhere plain text of 100 columns."""
    from rich.console import Console

    for number, block in enumerate(report.blocks):
        if number:
            print()
        if isinstance(block, str):
            print(block)
        elif sys.stdout.isatty():
            Console(highlight=False).print(block, crop=False)
        else:
            print(render(block))
