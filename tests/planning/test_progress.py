"""One line on a terminal, nothing elsewhere."""

from __future__ import annotations

import io
import sys
from math import inf

import pytest

from pipecompile.partitioners import Node, Problem, Progress, partition
from pipecompile.planning.progress import line, solving, working


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_says_what_is_known() -> None:
    early = line(4, Progress("orders", inf, 0.0, 0.2))
    assert early == "cutting into 4 stages, orders, 0 s"
    later = line(4, Progress("program", 0.01, 0.0095, 7.6))
    assert later == "cutting into 4 stages, program: slowest 10.0 ms, at least 9.5 ms, gap 5.0 %, 8 s"


def test_nothing_is_shown_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    with solving(2) as listener, working("measuring"):
        assert listener is None
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_the_search_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with solving(2) as listener:
        partition(Problem(tuple(Node(name, 1.0) for name in "abc")), 2, progress=listener)
    assert "cutting into 2 stages" in terminal.getvalue()
