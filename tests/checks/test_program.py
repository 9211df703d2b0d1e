from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from program_executor import Wrong, execute
from program_strategies import programs, split_backward

from pipecompile.checks import Level, verify, verify_program
from pipecompile.errors import VerifyError
from pipecompile.ir import HOST, Instruction, Op, Operand, Program, Route
from pipecompile.passes import lower
from pipecompile.program_text import parse_instruction
from pipecompile.schedules import build_schedule

ROUTES = (
    Route("x", HOST, (0, 1), 8.0),
    Route("a", 0, (1, 2), 4.0),
    Route("b", 1, (2,), 4.0, gradient=False),
    Route("y", 2, (HOST,), 4.0),
)
SMALL = {
    "three devices": lower(build_schedule("1f1b", 3, 2), ROUTES),
    "one device": lower(build_schedule("gpipe", 3, 2, n_devices=1), ROUTES),
    "split backward": lower(split_backward(build_schedule("1f1b", 3, 2), 1), ROUTES),
    "inference": lower(build_schedule("forward", 3, 2), ROUTES),
}


@pytest.mark.parametrize("program", SMALL.values(), ids=SMALL)
def test_every_single_damage_is_judged_as_the_executor_judges_it(program: Program) -> None:
    wrong = harmless = 0
    for device in range(program.n_devices):
        for index in range(len(program.rows[device])):
            for damage in damages(program, device, index):
                works = executes(damage)
                assert is_legal(damage) == works, damage
                wrong, harmless = wrong + (not works), harmless + works
    assert wrong > 100 and harmless > 0


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(programs(max_stages=4, max_microbatches=3), st.data())
def test_what_the_executor_finds_wrong_after_several_damages_is_flagged(program: Program, data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(1, 3))):
        device = data.draw(st.sampled_from([d for d, row in enumerate(program.rows) if row]))
        index = data.draw(st.integers(0, len(program.rows[device]) - 1))
        program = data.draw(st.sampled_from(list(damages(program, device, index))))
        if not program.rows[device]:
            break
    assert executes(program) or not is_legal(program)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs(max_stages=5, max_microbatches=5))
def test_lowered_programs_are_legal_and_do_the_right_thing(program: Program) -> None:
    verify(program)
    execute(program)


def damages(program: Program, device: int, index: int) -> Iterator[Program]:
    """Drop, duplicate, swap, delay, retarget, another slot, another operand: one instruction, one way each."""
    row = program.rows[device]
    one, before, after = row[index], row[:index], row[index + 1 :]
    yield with_row(program, device, (*before, *after))
    yield with_row(program, device, (*before, one, one, *after))
    if after:
        yield with_row(program, device, (*before, after[0], one, *after[1:]))
        yield with_row(program, device, (*before, *after, one))
        yield with_row(program, device, (*before, after[-1], one, *after[:-1]))
    if one.peer is not None:
        for peer in range(HOST, program.n_devices + 1):
            if peer != one.peer:
                yield with_row(program, device, (*before, replace(one, peer=peer), *after))
    for side in ("reads", "writes"):
        for position in range(len(getattr(one, side))):
            for operands in damaged_operands(getattr(one, side), position):
                yield with_row(program, device, (*before, replace(one, **{side: operands}), *after))


def damaged_operands(operands: tuple[Operand, ...], position: int) -> Iterator[tuple[Operand, ...]]:
    before, one, after = operands[:position], operands[position], operands[position + 1 :]
    for slot in (None, 0, 1, 7):
        if slot != one.slot:
            yield (*before, replace(one, slot=slot), *after)
    for value in (replace(one.value, microbatch=1 - one.value.microbatch), replace(one.value, name="b")):
        yield (*before, replace(one, value=value), *after)


def with_row(program: Program, device: int, row: tuple[Instruction, ...]) -> Program:
    return replace(program, rows=(*program.rows[:device], row, *program.rows[device + 1 :]))


def executes(program: Program) -> bool:
    try:
        execute(program)
    except Wrong:
        return False
    return True


def is_legal(program: Program) -> bool:
    try:
        verify(program)
    except VerifyError:
        return False
    return True
