"""Assign a buffer slot to every value: per (device, name, consumer) as few slots as values are live at one time.

    before   0F0 -> @0#0                       after   0F0 -> @0#0[0]
             0F1 -> @0#1                               0F1 -> @0#1[1]
             0B0 @0#0 ->                               0B0 @0#0[0] ->
             FREE @0#0                                 FREE @0#0[0]
             0F2 -> @0#2                               0F2 -> @0#2[0]

Lifetimes are intervals of the row. Taking the lowest free slot at each write colours this interval graph with the least
number of colours. O(n log n). Gavril, "Algorithms for minimum coloring ... of chordal graphs", SIAM J. Comput. 1972.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from pipecompile.ir import Instruction, Op, Operand, Program, Value

__all__ = ["assign_slots"]


def assign_slots(program: Program) -> Program:
    """Return the same instructions; every operand carries the slot of its value, from the write to the FREE."""
    rows = tuple(_row(row) for row in program.rows)
    return replace(program, rows=rows)


@dataclass(slots=True)
class _SlotPool:
    """The slots of one (name, consumer) on one device: how many exist, and a heap of the free ones."""

    size: int = 0
    free: list[int] = field(default_factory=list)

    def take(self) -> int:
        """Return the lowest free slot, or a new one."""
        if self.free:
            return heappop(self.free)
        self.size += 1
        return self.size - 1


def _row(row: Sequence[Instruction]) -> tuple[Instruction, ...]:
    pools: dict[tuple[str, int | None], _SlotPool] = {}
    placed_at: dict[Value, Operand] = {}
    result = []
    for instruction in row:
        for operand in instruction.writes:
            value = operand.value
            pool = pools.setdefault((value.name, value.consumer), _SlotPool())
            placed_at[value] = Operand(value, pool.take())
        reads, writes = (tuple([placed_at[o.value] for o in side]) for side in (instruction.reads, instruction.writes))
        others = instruction.action, instruction.peer, instruction.tie, instruction.overlaps
        result.append(Instruction(instruction.op, reads, writes, *others))
        if instruction.op is Op.FREE:
            (operand,) = reads
            assert operand.slot is not None
            heappush(pools[operand.value.name, operand.value.consumer].free, operand.slot)
    return tuple(result)
