"""FREEs of values that cross between devices come after the copies, and after the backward of their readers."""

from __future__ import annotations

from pipecompile.ir import HOST, Program, Route, Schedule
from pipecompile.passes import lower
from pipecompile.passes.copy_lifetimes import let_linger
from pipecompile.passes.liveness import insert_frees
from pipecompile.passes.lower_actions import lower_actions
from pipecompile.passes.transfers import insert_transfers
from pipecompile.schedules import build_schedule
from pipecompile.verifiers import Level, verify_program

CHAIN = (Route("v", 0, (1,)),)


def freed(csv: str, routes: tuple[Route, ...] = CHAIN) -> Program:
    """Return the program with FREEs, before `let_linger`."""
    return insert_frees(insert_transfers(lower_actions(Schedule.from_csv(csv), routes)))


def texts(program: Program, device: int) -> list[str]:
    return [str(instruction) for instruction in program.rows[device]]


def test_a_sent_value_is_freed_after_the_next_compute() -> None:
    program = freed("0F0,0F1\n1F0,1F1\n")
    before, after = texts(program, 0), texts(let_linger(program), 0)
    assert before == ["0F0 -> v#0", "SEND v#0 to 1", "FREE v#0", "0F1 -> v#1", "SEND v#1 to 1", "FREE v#1"]
    assert after == ["0F0 -> v#0", "SEND v#0 to 1", "0F1 -> v#1", "FREE v#0", "SEND v#1 to 1", "FREE v#1"]


def test_a_received_value_is_freed_after_what_its_reader_saved() -> None:
    row = texts(let_linger(freed("0F0,0B0\n1F0,1B0\n")), 1)
    assert row.index("FREE v#0") == row.index("FREE @1#0") + 1 > row.index("1B0 @1#0 -> v'1#0")


def test_a_received_gradient_is_kept_until_after_w() -> None:
    row = texts(let_linger(freed("0F0,0I0,0W0\n1F0,1I0,1W0\n")), 0)
    assert row.index("FREE v'1#0") == row.index("FREE @0.w#0") + 1 > row.index("0W0 @0.w#0 ->")


def test_values_of_the_host_and_of_one_device_are_freed_as_before() -> None:
    routes = (Route("x", HOST, (0,), gradient=False), Route("v", 0, (1,)))
    program = freed("0F0,1F0,1B0,0B0\n", routes)
    assert let_linger(program) == program


def test_the_result_is_legal_and_has_the_same_instructions() -> None:
    program = lower(build_schedule("zbv", 4, 6))
    assert lower(build_schedule("zbv", 4, 6), overlap=True) != program
    plain = freed(build_schedule("1f1b", 2, 4).to_csv())
    later = let_linger(plain)
    verify_program(later, Level.TRANSFERS)
    assert [sorted(texts(later, d)) for d in (0, 1)] == [sorted(texts(plain, d)) for d in (0, 1)]
