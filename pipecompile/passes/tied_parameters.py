"""Insert the exchanges of tied parameters: refresh the copies before the step, reduce their gradients after it.

    tie w: 0 2     before   0F0 0B0              after   BROADCAST w   0F0 0B0   REDUCE w
                            2F0 2B0                      BROADCAST w   2F0 2B0   REDUCE w

On every device that has one of the stages, if there are several devices; in the same order on all. Linear.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pipecompile.ir import UNTRAINED, Instruction, Op, Program
from pipecompile.ir.directions import all_placements

__all__ = ["insert_exchanges"]


def insert_exchanges(program: Program) -> Program:
    """Return the program with one BROADCAST per tie and device, and one REDUCE if the program has a backward."""
    trained = any(i.action is not None and i.action.kind not in UNTRAINED for row in program.rows for i in row)
    rows = []
    for device, row in enumerate(program.rows):
        first = _exchanges(program, Op.BROADCAST, device)
        last = _exchanges(program, Op.REDUCE, device) if trained else ()
        rows.append((*first, *row, *last))
    return replace(program, rows=tuple(rows))


def _exchanges(program: Program, op: Op, device: int) -> Iterator[Instruction]:
    for tie in program.ties:
        devices = tie.devices(*all_placements(program))
        if len(devices) > 1 and device in devices:
            yield Instruction(op, tie=tie.name)
