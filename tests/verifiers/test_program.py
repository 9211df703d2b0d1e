from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from program_executor import ExecutionError, execute
from program_strategies import programs

from pipecompile.errors import VerifyError
from pipecompile.ir import HOST, Instruction, Op, Operand, Program, Route, Tie, Value
from pipecompile.passes import Step, lower, lowering
from pipecompile.passes.split_backward import split_backward
from pipecompile.schedules import build_schedule
from pipecompile.verifiers import Level, verify, verify_program
from tests.support.launch_mutants import is_legal, with_row

ROUTES = (
    Route("x", HOST, (0, 1), 8.0),
    Route("a", 0, (1, 2), 4.0),
    Route("b", 1, (2,), 4.0, gradient=False),
    Route("y", 2, (HOST,), 4.0),
)
OPERAND = Operand(Value("a", 0), 0)
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
    assert wrong > 100
    assert harmless > 0


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
    changed = [replace(one, reads=reads) for reads in damaged_operands(one.reads)]
    changed += [replace(one, writes=writes) for writes in damaged_operands(one.writes)]
    yield from (with_row(program, device, (*before, other, *after)) for other in changed)


def damaged_operands(operands: tuple[Operand, ...]) -> Iterator[tuple[Operand, ...]]:
    for position, one in enumerate(operands):
        others = [replace(one, slot=slot) for slot in (None, 0, 1, 7) if slot != one.slot]
        others += [replace(one, value=replace(one.value, microbatch=1 - one.value.microbatch))]
        others += [replace(one, value=replace(one.value, name="b"))]
        yield from ((*operands[:position], other, *operands[position + 1 :]) for other in others)


def executes(program: Program) -> bool:
    try:
        execute(program)
    except ExecutionError:
        return False
    return True


def test_each_level_asks_for_what_the_passes_up_to_it_promise() -> None:
    steps: list[Step] = []
    lowering(ROUTES, (Tie("w", (0, 2)),)).run(build_schedule("1f1b", 3, 4), steps.append)
    programs = [step.after for step in steps]
    assert len(programs) == len(Level)
    for level in Level:
        for done, program in enumerate(programs):
            if done >= level:
                verify_program(program, level)
            else:
                with pytest.raises(
                    VerifyError, match="program" if level is Level.SLOTS else f"program at level {level.name}"
                ):
                    verify_program(program, level)


@pytest.mark.parametrize(
    ("instruction", "fault"),
    [
        (Instruction(Op.COMPUTE), "a compute instruction has an action, and no other has"),
        (Instruction(Op.FREE), "FREE reads 0 and writes 0 operands, expected 1 and 0"),
        (Instruction(Op.SEND, (OPERAND,)), "SEND and RECV have a peer, and no other has"),
        (Instruction(Op.FREE, (OPERAND,), peer=1), "SEND and RECV have a peer, and no other has"),
        (Instruction(Op.SEND, (OPERAND,), peer=0), "the peer must be another device, or the host"),
        (Instruction(Op.RECV, (), (OPERAND,), peer=3), "the peer must be another device, or the host"),
        (Instruction(Op.RECV, (), (OPERAND,), peer=-2), "the peer must be another device, or the host"),
    ],
)
def test_an_instruction_that_makes_no_sense_is_named_with_its_place(instruction: Instruction, fault: str) -> None:
    program = SMALL["three devices"]
    with pytest.raises(VerifyError) as caught:
        verify(with_row(program, 0, (*program.rows[0], instruction)))
    assert caught.value.faults == (f"device 0, step {len(program.rows[0])}: {instruction}: {fault}",)


def test_all_faults_are_reported_at_once() -> None:
    program = SMALL["inference"]
    dropped = {"0F0 x#0[0] -> a#0[0]", "FREE b#1[0]"}
    rows = tuple(tuple(i for i in row if str(i) not in dropped) for row in program.rows)
    with pytest.raises(VerifyError) as caught:
        verify(replace(program, rows=rows))
    assert caught.value.faults == (
        "stage 0 never runs F for micro-batch 0",
        "device 0, step 2, SEND a#0[0] to 1: a#0 is not on this device yet",
        "device 0, step 3, SEND a#0[0] to 2: a#0 is not on this device yet",
        "device 0, step 4, FREE a#0[0]: a#0 is not on this device yet",
        "device 1: b#1, written at step 9, is never freed",
        "device 2: b#1, written at step 8, is never freed",
    )
