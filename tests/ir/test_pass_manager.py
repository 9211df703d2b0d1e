from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from golden import CheckGolden

from pipecompile.ir import Schedule
from pipecompile.ir.pass_manager import Pass, PassManager, Step, watch
from pipecompile.passes import lower

GOLDEN = Path(__file__).parent / "golden" / "dump.txt"


def test_the_dump_shows_what_each_pass_did(check_golden: CheckGolden) -> None:
    def run(text: str) -> str:
        shown: list[str] = []
        lower(Schedule.from_csv(text), dump=shown.append)
        return re.sub(r"[0-9.]+ ms", "<time> ms", "".join(shown))

    check_golden(GOLDEN, run)


def test_passes_run_in_order_and_the_hook_sees_each_step() -> None:
    steps: list[Step] = []
    manager = PassManager((Pass("double", _times(2), _accept), Pass("increase", lambda n: n + 1, _accept)))
    assert manager.run(5, steps.append) == 11
    assert [(step.done.name, step.before, step.after) for step in steps] == [("double", 5, 10), ("increase", 10, 11)]
    assert all(step.seconds >= 0 for step in steps)


def test_a_pass_that_breaks_its_promise_is_stopped_after_its_dump_and_before_the_next_pass() -> None:
    def refuse(_: Any) -> None:
        raise ValueError("not legal")

    shown: list[str] = []
    ran: list[str] = []
    manager = PassManager((Pass("bad", _times(2), refuse), Pass("next", ran.append, _accept)))
    with pytest.raises(ValueError, match="not legal"):
        manager.run(5, watch(shown.append))
    assert [text.split(":")[0] for text in shown] == ["== bad"]
    assert not ran


def _times(factor: int) -> Callable[[int], int]:
    return lambda number: number * factor


def _accept(_: Any) -> None:
    pass
