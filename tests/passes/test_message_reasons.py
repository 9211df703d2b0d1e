"""Reasons in dumps: there is one per message and free that a pass placed, and each of them is true."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

import pipecompile as pc
from pipecompile.errors import VerifyError
from pipecompile.ir import Op, Program, chain
from pipecompile.passes import lower
from pipecompile.passes.communication_order import order_meetings
from pipecompile.passes.copy_lifetimes import let_linger
from pipecompile.passes.liveness import insert_frees
from pipecompile.passes.lower_actions import lower_actions
from pipecompile.passes.message_reasons import free_reasons, lingering_reasons, meeting_reasons, transfer_reasons
from pipecompile.passes.transfers import insert_transfers
from pipecompile.verifiers import Level, verify_program

NAMES = ["gpipe", "1f1b", "zb-h1", "interleaved", "zbv"]


def levels(name: str) -> tuple[Program, Program]:
    """Return the program of a schedule with its actions alone, and with transfers."""
    schedule = pc.build_schedule(name, 4, 4, n_devices=2 if name in ("interleaved", "zbv") else 4)
    computed = lower_actions(schedule, chain(4))
    return computed, insert_transfers(computed)


def moved_back(program: Program, device: int, text: str) -> Program:
    """Return the program with a RECV directly before its reader."""
    row = list(program.rows[device])
    receive = next(one for one in row if str(one) == text)
    row.remove(receive)
    reader = next(i for i, one in enumerate(row) if receive.writes[0] in one.reads)
    row.insert(reader, receive)
    rows = (*program.rows[:device], tuple(row), *program.rows[device + 1 :])
    return replace(program, rows=rows)


@pytest.mark.parametrize("name", NAMES)
def test_every_message_has_its_computation_or_its_reader(name: str) -> None:
    computed, sent = levels(name)
    lines = list(transfer_reasons(computed, sent))
    assert len(lines) == sum(one.op in (Op.SEND, Op.RECV) for row in sent.rows for one in row)
    for line in lines:
        message, _, reason = line.partition(": ")
        value = message.split()[3]
        action = re.search(r"\d+[FBIW]\d+", reason)
        assert action is not None
        (one,) = [one for row in sent.rows for one in row if one.action and str(one.action) == action[0]]
        operands = one.writes if "SEND" in message else one.reads
        assert value in map(str, operands)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "zbv"])
def test_a_receive_without_the_reason_deadlocks(name: str) -> None:
    """Moved back to its reader, each receive that broke a cycle closes one."""
    _, sent = levels(name)
    ordered = order_meetings(sent)
    verify_program(ordered, Level.MEETINGS)
    lines = list(meeting_reasons(sent, ordered))
    assert lines
    for line in lines:
        match = re.match(r"device (\d+), (RECV \S+ from \d+): before (.+), else each waits .*: (.+)$", line)
        assert match is not None, line
        device, waits = int(match[1]), match[4].split(" -> ")
        assert f"device {device} at {match[3]}" in waits
        assert len(waits) >= 2
        with pytest.raises(VerifyError, match=r"deadlock|not received in the order"):
            verify_program(moved_back(ordered, device, match[2]), Level.MEETINGS)


def test_a_receive_that_did_not_move_has_no_reason() -> None:
    computed, _ = levels("gpipe")
    forward = insert_transfers(lower_actions(pc.build_schedule("forward", 4, 4), chain(4)))
    assert not list(meeting_reasons(forward, order_meetings(forward)))
    assert computed


@pytest.mark.parametrize("ahead", [1, 3])
def test_receives_ahead_name_their_reader(ahead: int) -> None:
    _, sent = levels("1f1b")
    lines = list(meeting_reasons(sent, order_meetings(sent, ahead), ahead))
    assert lines
    assert all(f"up to {ahead} received value" in line for line in lines)
    assert "device 1, RECV v0#1 from 0: before 1F0, ahead of its reader 1F1" in "\n".join(lines)


@pytest.mark.parametrize("name", NAMES)
def test_a_free_names_the_last_use(name: str) -> None:
    _, sent = levels(name)
    program = insert_frees(order_meetings(sent))
    lines = list(free_reasons(sent, program))
    assert len(lines) == sum(one.op is Op.FREE for row in program.rows for one in row)
    for line in lines:
        match = re.match(
            r"device (\d+), FREE (\S+): after (.+), (its last use|which writes it: nothing reads it)$", line
        )
        assert match is not None, line
        row = [one for one in program.rows[int(match[1])] if one.op is not Op.FREE]
        users = [one for one in row if match[2] in map(str, (*one.reads, *one.writes))]
        assert str(users[-1].action or users[-1]) == match[3]


@pytest.mark.parametrize("name", NAMES)
def test_a_free_that_lingers_names_the_copy_or_what_may_hold_the_value(name: str) -> None:
    _, sent = levels(name)
    before = insert_frees(order_meetings(sent))
    after = let_linger(before)
    lines = list(lingering_reasons(before, after))
    assert lines
    for line in lines:
        match = re.match(r"device (\d+), FREE (\S+): after (?:FREE (@\S+),|.*its copy to (\d+) may run)", line)
        assert match is not None, line
        row = list(map(str, after.rows[int(match[1])]))
        if match[3]:
            assert row.index(f"FREE {match[3]}") < row.index(f"FREE {match[2]}")
        else:
            assert f"SEND {match[2]} to {match[4]}" in row


def test_the_dump_of_a_pass_ends_with_its_reasons() -> None:
    texts: list[Any] = []
    lower(pc.build_schedule("1f1b", 2, 3), dump=texts.append)
    by_name = {text.split(":")[0].removeprefix("== "): text for text in texts}
    assert "-- why\ndevice 0, SEND v0#0 to 1: after 0F0, which computes it\n" in by_name["transfers"]
    assert (
        "before SEND v0'1#0 to 0, else each waits for the next if sends wait: device 0 at SEND v0#1 to 1"
        in by_name["meetings"]
    )
    assert "device 1, FREE @1#0: after 1B0, its last use" in by_name["liveness"]
    assert "-- why" not in by_name["compute"] + by_name["slots"]
