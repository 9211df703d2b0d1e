"""Lines on a terminal and below a notebook's cell, nothing elsewhere."""

from __future__ import annotations

import io
import random
import re
import sys
import threading
import time
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace

import pytest
import torch

import pipecompile as pc
from pipecompile.text import progress
from pipecompile.text.progress import Task, switched, task


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Return a terminal in the place of stderr. Called by the test itself: pytest sets stderr again after fixtures."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(progress, "DELAY", 0.0)
    return stream


def wait_for(text: str, stream: io.StringIO) -> None:
    end = time.perf_counter() + 10
    while text not in stream.getvalue():
        assert time.perf_counter() < end, stream.getvalue()
        time.sleep(0.01)


def test_a_task_says_what_is_known() -> None:
    now = time.perf_counter()
    assert str(Task("saving", start=now - 3)) == "saving, 3 s"
    assert str(Task(lambda: "cutting: gap 5.0%", start=now - 3)) == "cutting: gap 5.0%, 3 s"
    measured = Task("measuring 12 operations", 40, start=now - 4)
    assert str(measured) == "measuring 12 operations: 0 of 40"
    measured.advance(10)
    assert str(measured) == "measuring 12 operations: 10 of 40, 12 s left"
    measured.advance(40)
    assert str(measured) == "measuring 12 operations: 40 of 40, 0 s left"


def test_nothing_is_shown_where_nobody_looks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "DELAY", 0.0)
    threads = threading.active_count()
    with task("measuring", 3) as work:
        work.advance()
        assert threading.active_count() == threads
    assert capsys.readouterr() == ("", "")


def test_nested_tasks_are_lines_of_one_picture_which_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    state = random.getstate()
    with task("compiling"), task("measuring 12 operations", 40) as work:
        work.advance(10)
        wait_for("measuring 12 operations: 10 of 40", terminal)
        assert "compiling, 0 s" in terminal.getvalue()
    assert terminal.getvalue().endswith(("\x1b[2K", "\x1b[?25h"))
    assert not progress._owner
    assert not progress._open
    assert random.getstate() == state


def test_quick_work_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    monkeypatch.setattr(progress, "DELAY", 60.0)
    with task("quick"):
        pass
    assert terminal.getvalue() == ""


def test_a_failure_removes_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)

    def fail() -> None:
        wait_for("dividing", terminal)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), task("dividing"):
        fail()
    assert not progress._owner


@pytest.mark.parametrize("silent", ["switched", "rank", "dumb", "variable"])
def test_progress_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, silent: str) -> None:
    terminal = on_terminal(monkeypatch)
    if silent == "rank":
        monkeypatch.setenv("RANK", "1")
    if silent == "variable":
        monkeypatch.setenv("PIPECOMPILE_PROGRESS", "0")
    if silent == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    with switched(silent != "switched"), switched(True), task("hidden"):
        assert not progress._owner
    assert terminal.getvalue() == ""


def test_tasks_of_another_thread_stay_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    on_terminal(monkeypatch)
    seen = []

    def other() -> None:
        with task("hidden"):
            seen.extend(map(str, progress._open))

    with task("shown"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert [text.partition(",")[0] for text in seen] == ["shown"]


def test_a_notebook_shows_html_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for IPython, of which three names are used: get_ipython, display and HTML."""
    shown: list[str] = []
    display = ModuleType("IPython.display")
    handle = SimpleNamespace(update=shown.append)
    display.HTML = str  # type: ignore[attr-defined]
    display.display = lambda content, display_id: shown.append(content) or handle  # type: ignore[attr-defined]
    shell = ModuleType("IPython")
    shell.get_ipython = lambda: SimpleNamespace(config={"IPKernelApp": {}})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(progress, "DELAY", 0.0)
    with task("a < b", 4) as work:
        work.advance()
        end = time.perf_counter() + 10
        while not shown and time.perf_counter() < end:
            time.sleep(0.01)
    assert re.match(r'<div><progress value="[01]" max="4"></progress> a &lt; b: [01] of 4', shown[0])
    assert shown[-1] == ""


def test_compile_records_measures_and_solves_with_lines_and_without_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []

    class Screen:
        def show(self, tasks: Sequence[Task]) -> None:
            lines.extend(map(str, tasks))

        def clear(self) -> None:
            lines.append("cleared")

    monkeypatch.setattr(progress, "_screen", Screen)
    monkeypatch.setattr(progress, "DELAY", 0.0)
    monkeypatch.setattr(progress, "_INTERVAL", 1e-4)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(12)))
    pc.compile(model, 4, example_args=(torch.ones(16, 64),), cost="profile", progress=False)
    assert lines == []
    pc.compile(model, 4, example_args=(torch.ones(16, 64),), cost="profile", schedule="auto", loss_fn=torch.sum)
    text = "\n".join(lines)
    for words in ("recording Sequential: ", "measuring 12 operations: ", "comparing schedules", "cleared"):
        assert words in text
    assert re.search(r"measuring 12 operations: \d+ of \d+, \d+ s left", text)
    lines.clear()
    pc.auto_schedule(4, 8)
    assert re.search(r"searching a schedule for 8 micro-batches, best of \d+: ", "\n".join(lines))
