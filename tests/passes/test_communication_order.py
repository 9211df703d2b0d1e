from __future__ import annotations

from pathlib import Path

import pytest
from golden import CheckGolden
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from program_strategies import route_lists, schedules

from pipecompile.ir import Instruction, Op, Program, Schedule, chain
from pipecompile.ir.program_text import parse_program
from pipecompile.passes.communication_order import order_meetings
from pipecompile.passes.lower_actions import lower_actions
from pipecompile.passes.transfers import insert_transfers
from pipecompile.schedules import build_schedule
from pipecompile.verifiers import Level, verify_program

GOLDEN = Path(__file__).parent / "golden" / "meetings.txt"


def test_receives_are_posted_where_no_model_of_communication_gets_stuck(check_golden: CheckGolden) -> None:
    def run(text: str) -> str:
        first, _, program = text.partition("\n")
        return str(order_meetings(parse_program(program), int(first.removeprefix("ahead "))))

    check_golden(GOLDEN, run)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schedules(), st.data(), st.sampled_from([0, 1, 2, 5, 99]))
def test_every_schedule_under_any_routes_meets(schedule: Schedule, data: st.DataObject, ahead: int) -> None:
    routes = data.draw(route_lists(schedule.n_stages))
    before = insert_transfers(lower_actions(schedule, routes))
    after = order_meetings(before, ahead)
    verify_program(after, Level.MEETINGS)
    for old, new in zip(before.rows, after.rows, strict=True):
        assert sorted(map(str, old)) == sorted(map(str, new))
        assert [i for i in old if i.op is not Op.RECV] == [i for i in new if i.op is not Op.RECV]


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_no_more_receives_wait_to_be_read_than_asked_for(ahead: int) -> None:
    program = order_meetings(insert_transfers(lower_actions(build_schedule("gpipe", 4, 9), chain(4))), ahead)
    most = [_most_unread(row) for row in program.rows]
    assert max(most) == ahead + 1  # the next to be read, and those ahead


def _most_unread(row: tuple[Instruction, ...]) -> int:
    unread: set[object] = set()
    most = 0
    for instruction in row:
        unread |= {operand.value for operand in instruction.writes} if instruction.op is Op.RECV else set()
        most = max(most, len(unread))
        unread -= {operand.value for operand in instruction.reads}
    return most


def test_late_receives_stay_at_their_reader_where_nothing_is_stuck() -> None:
    program: Program = insert_transfers(lower_actions(build_schedule("gpipe", 3, 4), chain(3)))
    assert order_meetings(program) == program
