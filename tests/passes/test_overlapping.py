from __future__ import annotations

from dataclasses import replace

import pytest

from pipecompile.errors import InputError, VerifyError
from pipecompile.ir import Action, Schedule
from pipecompile.ir.program_text import parse_program
from pipecompile.passes import lower
from pipecompile.passes.checkpointing import insert_recompute
from pipecompile.passes.offloading import insert_offload
from pipecompile.passes.overlapping import insert_overlap
from pipecompile.passes.split_backward import split_backward
from pipecompile.schedules import build_schedule
from pipecompile.simulation.simulator import simulate
from pipecompile.verifiers import verify

SHORT = "0F0,0F1,0F2,(0F3;0B0)OVERLAP_F_B,0B1,0B2,0B3\n1F0,1F1,(1F2;1B0)OVERLAP_F_B,1B1,1F3,1B2,1B3\n"
TIMES = {"transfer": 0.25, "forward_communication": 0.25, "backward_communication": 0.75, "saved_bytes": 2.0}


def overlap(text: str, *pairs: str) -> Schedule:
    schedule = Schedule.from_csv(text)
    parsed = frozenset((Action.parse(a), Action.parse(b)) for a, b in (pair.split() for pair in pairs))
    return replace(schedule, overlaps=parsed)


def test_what_a_pair_reads_comes_before_both_and_what_it_computes_leaves_after_both() -> None:
    program = lower(Schedule.from_csv(SHORT))
    lines = [line.strip() for line in str(program).splitlines()]
    first = lines.index("OVERLAP 1F2 v0#2[0] -> @1#2[2]")
    assert lines[first - 1 : first + 6] == [
        "RECV v0#2[0] from 0",
        "OVERLAP 1F2 v0#2[0] -> @1#2[2]",
        "1B0 @1#0[0] -> v0'1#0[0]",
        "FREE v0#2[0]",
        "FREE @1#0[0]",
        "SEND v0'1#0[0] to 0",
        "FREE v0'1#0[0]",
    ]
    assert parse_program(str(program)) == program


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zbv", "dualpipev"])
def test_a_program_takes_the_time_of_its_schedule(name: str, ahead: int) -> None:
    """All passes keep a pair together: what stands between would take its part of the memory and of the time."""
    schedule = insert_overlap(build_schedule(name, 4, 6, n_devices=4 if name in ("1f1b", "zb-h1") else 2))
    assert schedule.overlaps
    for each in (schedule, split_backward(schedule, 1), insert_recompute(schedule, "except_last")):
        verify(each)
        program = lower(each, receive_ahead=ahead)
        assert program.overlaps == each.overlaps != frozenset()
        assert simulate(program, **TIMES).makespan == pytest.approx(simulate(each, **TIMES).makespan)


def test_copies_to_the_host_stay_outside_of_pairs() -> None:
    moved = insert_offload(Schedule.from_csv(SHORT))
    verify(moved)
    assert moved.to_csv().splitlines()[0] == (
        "0F0,0OFFLOAD0,0F1,0OFFLOAD1,0F2,0OFFLOAD2,0RELOAD0,0RELOAD1,(0F3;0B0)OVERLAP_F_B,0OFFLOAD3,0RELOAD2,0B1,0RELOAD3,0B2,0B3"
    )
    assert lower(moved).overlaps == moved.overlaps


ROWS = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("0F0 0F1", "0F0 overlaps with 0F1: the first has to be F, and the other B or I"),
        ("0F1 0B1", "0F1 overlaps with 0B1, which is not the next action of a row"),
        ("0F1 1B0", "0F1 overlaps with 1B0, which is not the next action of a row"),
        ("1F0 1B0", "1B0 overlaps with 1F0, which it needs"),
    ],
)
def test_what_cannot_overlap_is_refused(pair: str, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        verify(overlap(ROWS, pair))


def test_a_pair_that_waits_for_itself_through_another_device_is_a_deadlock() -> None:
    """1B0 is before 1F1 and needs nothing of it: the first device may overlap, and not if the second one does too."""
    verify(overlap(ROWS, "0F1 0B0"))
    assert insert_overlap(Schedule.from_csv(ROWS)) == overlap(ROWS, "0F1 0B0")
    rows = "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
    with pytest.raises(VerifyError, match="deadlock, each waits for the next: 0F1"):
        verify(overlap(rows, "0F1 0B0"))


def test_of_two_pairs_that_wait_for_one_another_one_overlaps() -> None:
    schedule = Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n")
    assert [(str(a), str(b)) for a, b in insert_overlap(schedule).overlaps] == [("1F1", "1B0")]


def test_only_schedules_overlap() -> None:
    with pytest.raises(InputError, match="a str is not a Schedule"):
        insert_overlap("1f1b")  # type: ignore[arg-type]
