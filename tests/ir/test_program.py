"""The text of values, operands and instructions, and the names of what a stage saves."""

from __future__ import annotations

from pipecompile.ir import (
    HOST,
    Action,
    Instruction,
    Kind,
    Op,
    Operand,
    Program,
    Value,
    chain,
    part_of,
    recipe,
    saved,
    weight_saved,
)


def test_how_values_and_instructions_are_written() -> None:
    grad = Operand(Value("h", 3, HOST), 1)
    forward = Instruction(Op.COMPUTE, (Operand(Value("h", 3)),), (Operand(saved(1, 3)),), Action(1, Kind.FORWARD, 3))
    assert str(forward) == "1F3 h#3 -> @1#3"
    assert str(Instruction(Op.COMPUTE, action=Action(1, Kind.WEIGHT_GRAD, 3))) == "1W3 ->"
    assert str(Instruction(Op.SEND, (grad,), peer=2)) == "SEND h'host#3[1] to 2"
    assert str(Instruction(Op.RECV, (), (grad,), peer=HOST)) == "RECV h'host#3[1] from host"
    assert str(Instruction(Op.FREE, (grad,))) == "FREE h'host#3[1]"
    assert str(Instruction(Op.REDUCE, tie="w")) == "REDUCE w"
    assert str(Action(1, Kind.RECOMPUTE, 3)) == "1R3"
    assert [str(make(1, 3)) for make in (saved, weight_saved, recipe)] == ["@1#3", "@1.w#3", "@1.r#3"]


def test_what_i_leaves_for_w_is_part_of_what_was_saved() -> None:
    assert part_of(weight_saved(1, 3)) == saved(1, 3)
    assert [part_of(value) for value in (saved(1, 3), recipe(1, 3), Value("fc.w", 3))] == [None, None, None]


def test_the_text_of_a_program_has_a_header_its_routes_and_its_rows() -> None:
    free = Instruction(Op.FREE, (Operand(saved(1, 0)),))
    program = Program(2, 1, (0, 1), chain(2), ((), (free,)))
    assert str(program).splitlines() == [
        "program: 2 stages on devices 0 1, 1 micro-batches",
        "route v0: 0 -> 1, 0 bytes, gradient",
        "device 0",
        "device 1",
        "  FREE @1#0",
    ]


def test_repr_is_one_short_line() -> None:
    program = Program(2, 1, (0, 1), chain(2), ((), (Instruction(Op.REDUCE, tie="w"),)))
    assert repr(program) == "Program(n_stages=2, n_microbatches=1, n_devices=2, n_instructions=1)"
