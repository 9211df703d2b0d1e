from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pipecompile.distributed.messages.row_messages import (
    Departure,
    LeavesRead,
    departures,
    directed_pairs,
    incoming,
    sending_action,
    summary,
)
from pipecompile.ir import HOST, LOSS, Program, Route
from pipecompile.parameters.tied_mirrors import Mirrors
from pipecompile.passes import lower
from pipecompile.schedules import build_schedule

ROUTES = (Route("x", HOST, (0,)), Route("h", 0, (1,)), Route(LOSS, 1, (HOST,)))


def program(schedule: str = "gpipe", routes: tuple[Route, ...] = ROUTES, n_microbatches: int = 2) -> Program:
    return lower(build_schedule(schedule, 2, n_microbatches), routes)


def of_placements(*placements: tuple[int, ...]) -> Mirrors:
    return Mirrors(placements=placements)


def test_the_losses_of_all_micro_batches_are_one_departure() -> None:
    assert departures(program()) == (Departure(1, LOSS, (0, 1)),)


def test_leaves_that_a_rank_reads_are_found_once_by_recording_and_inputs() -> None:
    """Device 0 reads `x`; device 1 reads `mask`, and has the last stage, which reads all that is in the target."""
    routes = (*ROUTES, Route("mask", HOST, (1,)))
    recording = SimpleNamespace(number=3, routes=routes, inputs=("x", "mask"), mirrors=of_placements((0, 1)))
    asked = list[int]()

    def recordings() -> list[Any]:
        asked.append(1)
        return [recording]

    first, last = LeavesRead(recordings, 0), LeavesRead(recordings, 1)
    assert first(3, 2) == first(3, 2) == 0b01
    assert len(asked) == 1
    assert last(3, 2) == (1 << 62) - 2
    assert first(3, 1) is None
    assert first(4, 2) is None


def test_a_rank_reads_what_its_copies_of_stages_read() -> None:
    placements = (0, 1), (1, 0)
    recording = SimpleNamespace(number=1, routes=ROUTES, inputs=("x",), mirrors=of_placements(*placements))
    assert LeavesRead(lambda: [recording], 0)(1, 1) == LeavesRead(lambda: [recording], 1)(1, 1) == (1 << 62) - 1


def test_losses_depart_from_each_device_with_a_copy_of_the_last_stage() -> None:
    lowered = lower(build_schedule("chimera", 2, 4), ROUTES)
    assert departures(lowered) == (Departure(0, LOSS, (1, 3)), Departure(1, LOSS, (0, 2)))


def test_other_outputs_are_a_departure_per_micro_batch() -> None:
    routes = (*ROUTES[:2], Route("y", 1, (HOST,)))
    assert list(map(str, departures(program("forward", routes)))) == ["y#0 for all", "y#1 for all"]


def test_the_values_that_come_from_each_peer() -> None:
    assert incoming(program(), 0) == {1: ("h'1#0", "h'1#1", f"{LOSS} for all")}
    assert incoming(program(), 1) == {0: ("h#0", "h#1")}


@pytest.mark.parametrize(
    ("device", "awaited", "is_begun", "action"),
    [
        (0, {"h#2"}, True, "0F2"),
        (0, {"h#2", "h#1"}, True, "0F1"),
        (1, {"h'1#1"}, True, "1B1"),
        (1, {"h'1#1"}, False, "1B1"),  # the run of a rank that waits may be ahead of that of the rank that reports
        (1, {"tied"}, True, "1B3"),
        (1, {"tied"}, False, "1F0"),
    ],
)
def test_the_action_that_sends_an_awaited_value(device: int, awaited: set[str], is_begun: bool, action: str) -> None:
    row = program(n_microbatches=4).rows[device]
    assert str(sending_action(row, awaited, is_begun=is_begun)) == action


def test_a_row_without_actions_sends_nothing() -> None:
    assert sending_action((), {"h#0"}, is_begun=True) is None


def test_summaries_differ_by_instructions_and_counts() -> None:
    programs = [program(), program("1f1b", n_microbatches=4), program(n_microbatches=4)]
    assert len(set(map(summary, programs))) == 3
    assert summary(program()) == summary(program())
    assert summary(program()).startswith("2 stages, 2 micro-batches, ")


def test_the_pairs_between_which_values_go() -> None:
    """A skip, gradients, and the loss, which goes from the last device to all."""
    routes = (Route("x", HOST, (0,)), Route("h", 0, (1,)), Route("k", 1, (2,)), Route("skip", 0, (2,), gradient=False))
    program = lower(build_schedule("1f1b", 4, 4), (*routes, Route("l", 2, (3,)), Route(LOSS, 3, (HOST,))))
    assert directed_pairs(program) == {(0, 1), (1, 0), (1, 2), (2, 1), (0, 2), (2, 3), (3, 2), (3, 0), (3, 1)}
