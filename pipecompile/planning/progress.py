"""The progress of a long compilation: one line on a terminal, removed at the end. Nothing is written to other outputs.

cutting into 8 stages, program: slowest 12.4 ms, at least 12.1 ms, gap 2.4 %, 8 s
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite

from rich.console import Console

from pipecompile.ir.units import SECONDS, written
from pipecompile.partitioners import Progress
from pipecompile.partitioners.incumbent import ProgressCallback

__all__ = ["line", "solving", "working"]


@contextmanager
def working(text: str) -> Iterator[None]:
    """Show a text while the block runs, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    with Console(stderr=True).status(text):
        yield


@contextmanager
def solving(n_stages: int) -> Iterator[ProgressCallback | None]:
    """Yield a callback for `partition` that shows its progress; None if stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    with Console(stderr=True).status(f"cutting into {n_stages} stages") as status:
        yield lambda progress: status.update(line(n_stages, progress))


def line(n_stages: int, progress: Progress) -> str:
    """Return the progress of a solver as one line: phase, incumbent, bound, gap, seconds."""
    text = f"cutting into {n_stages} stages, {progress.phase}"
    if isfinite(progress.incumbent):
        text += f": slowest {written(SECONDS, progress.incumbent)}, at least {written(SECONDS, progress.bound)}"
        text += f", gap {100 * progress.gap:.1f} %"
    return f"{text}, {progress.seconds:.0f} s"
