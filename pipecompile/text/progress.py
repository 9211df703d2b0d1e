"""The progress of work that may take seconds: a line per task, on a terminal or below a cell of a notebook, removed at the end.

    with task("measuring 120 operations", total=1440) as shown:
        shown.advance()

    measuring 120 operations: 240 of 1440, 8 s left

Tasks nest, and one thread draws all of them: work is not slowed where it is timed. Nothing is written to files and pipes, nor by
ranks other than the first, nor inside `switched(False)`, nor with PIPECOMPILE_PROGRESS=0 in the environment. Work that ends within
`DELAY` shows nothing.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

__all__ = ["DELAY", "Task", "switched", "task"]

DELAY = 0.5
"""Seconds of work before the first line."""
_INTERVAL = 0.25
"""Seconds between two pictures: drawing ten times a second took 2 % of a core of a machine with two."""

_is_on: ContextVar[bool] = ContextVar("pipecompile progress", default=True)
_open: list[Task] = []
"""The tasks of the thread that draws, the outermost first."""
_owner: list[int] = []
"""The thread whose tasks are shown; empty if none is."""


@dataclass(slots=True, eq=False)
class Task:
    """A piece of work: what it does, as a text or as a function that returns the text, and how many of its steps are done."""

    text: str | Callable[[], str]
    total: int | None = None
    done: int = 0
    start: float = field(default_factory=perf_counter)

    def advance(self, steps: int = 1) -> None:
        """Count finished steps."""
        self.done += steps

    def __str__(self) -> str:
        line = self.text if isinstance(self.text, str) else self.text()
        seconds = perf_counter() - self.start
        if not self.total:
            return f"{line}, {seconds:.0f} s"
        done = min(self.done, self.total)
        left = f", {seconds * (self.total - done) / done:.0f} s left" if done else ""
        return f"{line}: {done} of {self.total}{left}"


@contextmanager
def switched(on: bool) -> Iterator[None]:
    """Show no progress inside the block, unless `on`."""
    token = _is_on.set(_is_on.get() and on)
    try:
        yield
    finally:
        _is_on.reset(token)


@contextmanager
def task(text: str | Callable[[], str], total: int | None = None) -> Iterator[Task]:
    """Show a task while the block runs, on a terminal or in a notebook. Tasks of other threads than the one that is shown stay hidden."""
    work, thread = Task(text, total), threading.get_ident()
    if _owner:
        is_mine = _owner[0] == thread and _is_on.get()
        screen = None
    else:
        screen = _screen() if _is_on.get() else None
        is_mine = screen is not None
    if not is_mine:
        yield work
        return
    _open.append(work)
    try:
        with _drawn_by(screen, thread):
            yield work
    finally:
        _open.remove(work)


@contextmanager
def _drawn_by(screen: Screen | None, thread: int) -> Iterator[None]:
    """Draw the open tasks in a thread of its own while the block runs; None: they are drawn already."""
    if screen is None:
        yield
        return
    ended = threading.Event()
    drawing = threading.Thread(target=_draw, args=(screen, ended), name="pipecompile-progress", daemon=True)
    _owner.append(thread)
    drawing.start()
    try:
        yield
    finally:
        ended.set()
        drawing.join()
        _owner.clear()


def _draw(screen: Screen, ended: threading.Event) -> None:
    if ended.wait(DELAY):
        return
    try:
        while True:
            screen.show([*_open])
            if ended.wait(_INTERVAL):
                return
    finally:
        screen.clear()


class Screen(Protocol):
    """The surface that tasks are drawn on."""

    def show(self, tasks: Sequence[Task]) -> None:
        """Draw the tasks, over the earlier ones."""

    def clear(self) -> None:
        """Remove what was drawn."""


def _screen() -> Screen | None:
    """Return the notebook's cell or the terminal; None elsewhere."""
    if os.environ.get("RANK", "0") != "0" or os.environ.get("PIPECOMPILE_PROGRESS") == "0":
        return None
    if (shell := _notebook()) is not None:
        return _Cell(shell)
    return _Terminal() if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else None


def _notebook() -> Any:
    """Return the IPython module of a kernel, which displays HTML; None elsewhere."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return module if shell is not None and "IPKernelApp" in getattr(shell, "config", {}) else None


class _Terminal:
    """Lines of rich on stderr: a bar where the number of steps is known."""

    def __init__(self) -> None:
        state = random.getstate()  # importing rich draws
        from rich.console import Console
        from rich.live import Live

        random.setstate(state)
        console = Console(stderr=True)
        self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=sys.stdout.isatty())
        self._is_started = False

    def show(self, tasks: Sequence[Task]) -> None:
        """Draw a row per task."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 1))
        for depth, work in enumerate(tasks):
            bar = ProgressBar(total=work.total, completed=work.done, width=24) if work.total else ""
            grid.add_row(Text("  " * depth + str(work), no_wrap=True, overflow="ellipsis"), bar)
        if not self._is_started:
            self._live.start()
            self._is_started = True
        self._live.update(grid, refresh=True)

    def clear(self) -> None:
        """Remove the rows."""
        if self._is_started:
            self._live.stop()


class _Cell:
    """Text below the cell of a notebook, replaced in its place."""

    def __init__(self, shell: Any) -> None:
        from importlib import import_module

        self._html = import_module(f"{shell.__name__}.display").HTML
        self._display = import_module(f"{shell.__name__}.display").display
        self._handle: Any = None

    def show(self, tasks: Sequence[Task]) -> None:
        """Draw a line per task, with a bar of HTML where the number of steps is known."""
        from html import escape

        lines = []
        for work in tasks:
            bar = f'<progress value="{work.done}" max="{work.total}"></progress> ' if work.total else ""
            lines.append(f"<div>{bar}{escape(str(work))}</div>")
        content = self._html("".join(lines))
        if self._handle is None:
            self._handle = self._display(content, display_id=True)
        else:
            self._handle.update(content)

    def clear(self) -> None:
        """Leave an empty text."""
        if self._handle is not None:
            self._handle.update(self._html(""))
