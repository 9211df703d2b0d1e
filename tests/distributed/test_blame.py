"""Which action is named of a rank that is lost: the first whose result somebody waits for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pipecompile.distributed.blame import AwaitedMessage, FailureReport
from pipecompile.distributed.rank_executable import RankExecutable
from pipecompile.distributed.status_board import StatusBoard
from pipecompile.ir import HOST, Route
from pipecompile.passes import lower
from pipecompile.schedules import build_schedule

ROUTES = (Route("x", HOST, (0,)), Route("h", 0, (1,)), Route("loss", 1, (HOST,)))


@pytest.mark.parametrize(
    ("wanted", "is_begun", "action"),
    [
        ("h#2", True, "0F2"),
        ("h'1#1", True, "1B1"),
        ("h'1#1", False, "1B1"),  # who asks may be a step ahead of who waits
        ("tied 0", True, "1B3"),
        ("tied 0", False, "1F0"),
    ],
)
def test_the_action_that_is_named(wanted: str, is_begun: bool, action: str) -> None:
    program = lower(build_schedule("gpipe", 2, 4), ROUTES)
    lost = 0 if wanted == "h#2" else 1
    communicator: Any = SimpleNamespace(
        wanted=lambda *_: {wanted}, ranks=SimpleNamespace(rank_of=lambda device: device)
    )
    here: Any = SimpleNamespace(program=program, communicator=communicator)
    found = RankExecutable._blamed(here, FailureReport(lost, "it was killed"), is_begun)
    assert found.action == f"before {action} had come"
    assert (found.stage, found.microbatch) == (int(action[0]), int(action[2]))


def test_of_two_steps_the_earlier_counts() -> None:
    """Rank 0 waits in step 3 for a gradient of rank 1, and rank 2 is in step 4 already; rank 3 waits for rank 2."""
    said = {0: AwaitedMessage(1, "h'1#1", 3), 2: AwaitedMessage(1, "h#0", 4), 3: AwaitedMessage(2, "g#0", 4)}
    here: Any = SimpleNamespace(ranks=SimpleNamespace(members=range(4)), step=4, waits=said.get)
    assert StatusBoard.wanted(here, 1, "h#0 was to come from it") == {"h'1#1"}
    here.step, said[2] = 3, AwaitedMessage(1, "h#3", 3)
    assert StatusBoard.wanted(here, 1, "own") == {"h'1#1", "h#3", "own"}
    said.clear()
    assert StatusBoard.wanted(here, 1, "own") == {"own"}
