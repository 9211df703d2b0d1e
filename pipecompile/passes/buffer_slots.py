"""Give every value a buffer slot: as few per (device, name, consumer) as are ever live at one time.

    before   0F0 -> @0#0                       after   0F0 -> @0#0[0]
             0F1 -> @0#1                               0F1 -> @0#1[1]
             0B0 @0#0 ->                               0B0 @0#0[0] ->
             FREE @0#0                                 FREE @0#0[0]
             0F2 -> @0#2                               0F2 -> @0#2[0]

Lifetimes are intervals of the row, and taking the lowest free slot at each write colours an interval graph with as few
colours as can be. O(n log n). Gavril, "Algorithms for minimum coloring ... of chordal graphs", SIAM J. Comput. 1972.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from pipecompile.ir import Instruction, Op, Operand, Program, Value

__all__ = ["assign_slots"]


def assign_slots(program: Program) -> Program:
    """The same instructions; every operand carries the slot that its value holds from its write to its FREE."""
    rows = tuple(_row(row) for row in program.rows)
    return replace(program, rows=rows)


@dataclass(slots=True)
class _Shelf:
    """The slots of one (name, consumer) on one device."""

    size: int = 0
    empty: list[int] = field(default_factory=list)

    def take(self) -> int:
        if self.empty:
            return heappop(self.empty)
        self.size += 1
        return self.size - 1


def _row(row: Sequence[Instruction]) -> tuple[Instruction, ...]:
    shelves: dict[tuple[str, int | None], _Shelf] = {}
    home: dict[Value, Operand] = {}
    placed = []
    for instruction in row:
        for operand in instruction.writes:
            value = operand.value
            shelf = shelves.setdefault((value.name, value.consumer), _Shelf())
            home[value] = Operand(value, shelf.take())
        reads, writes = (tuple([home[o.value] for o in side]) for side in (instruction.reads, instruction.writes))
        placed.append(Instruction(instruction.op, reads, writes, instruction.action, instruction.peer, instruction.tie))
        if instruction.op is Op.FREE:
            (operand,) = reads
            assert operand.slot is not None
            heappush(shelves[operand.value.name, operand.value.consumer].empty, operand.slot)
    return tuple(placed)
