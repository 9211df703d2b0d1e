"""Registers of a compute instruction, by the names of its operands."""

from __future__ import annotations

from pipecompile.ir import HOST, Instruction, Op, Operand, Value
from pipecompile.runtime.registers import CellRegisters

READS = (
    Operand(Value("h", 0)),
    Operand(Value("y", 0, 1)),
    Operand(Value("y", 0, HOST)),
    Operand(Value("y", 0, 3)),
    Operand(Value("z", 0, 2)),
)
WRITES = (Operand(Value("out", 0), 1), Operand(Value("h", 0, 2)), Operand(Value("x", 0, 2)))


def registers() -> CellRegisters:
    number = {operand: index for index, operand in enumerate((*READS, *WRITES))}
    return CellRegisters(Instruction(Op.COMPUTE, reads=READS, writes=WRITES), number.__getitem__)


def test_activations_are_found_by_name_and_gradients_are_not_among_them() -> None:
    assert registers().reads == {"h": 0}
    assert registers().writes == {"out": 5}


def test_gradients_of_an_output_come_host_first_then_by_falling_consumer() -> None:
    assert registers().output_gradients(["z", "y"]) == [(1, [2, 3, 1]), (0, [4])]


def test_gradients_of_inputs_are_pairs_of_register_and_input() -> None:
    assert registers().input_gradients(["x", "h"]) == [(6, 1), (7, 0)]


def test_the_slot_of_a_written_value() -> None:
    assert registers().slot_of(Value("out", 0)) == 1
    assert registers().slot_of(Value("nothing", 0)) is None
