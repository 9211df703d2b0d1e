"""Free every value directly after its last use on a device.

    before   0F0 x#0 -> v0#0 @0#0              after   0F0 x#0 -> v0#0 @0#0
                                                       FREE x#0
             SEND v0#0 to 1                            SEND v0#0 to 1
                                                       FREE v0#0

A use is a read or a send; a value without a use is freed after its write. `@s#m` is therefore freed after B or I, and
`@s.w#m` after W. What the first of two actions that overlap uses last is freed after both. One walk from the end of each row: the
first occurrence of a value is its last use. Linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipecompile.ir import Instruction, Op, Operand, Program, Value

__all__ = ["insert_frees"]


def insert_frees(program: Program) -> Program:
    """Return the program with exactly one FREE per value and device, after the last use."""
    rows = tuple(_row(row) for row in program.rows)
    return replace(program, rows=rows)


def _row(row: Sequence[Instruction]) -> tuple[Instruction, ...]:
    freed: set[Value] = set()
    backwards: list[Instruction] = []
    second: Instruction | None = None
    for instruction in reversed(row):
        last_used: dict[Value, Operand] = {}
        for operand in (*instruction.reads, *instruction.writes):
            if operand.value not in freed:
                last_used[operand.value] = operand
        freed.update(last_used)
        frees = [Instruction(Op.FREE, reads=(operand,)) for operand in reversed(last_used.values())]
        if instruction.overlaps and second is not None:
            backwards[-1:] = [*frees, second]
        else:
            backwards += frees
        backwards.append(instruction)
        second = instruction
    return tuple(reversed(backwards))
