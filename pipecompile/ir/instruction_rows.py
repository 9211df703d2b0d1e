"""Rows of instructions as arrays: per instruction, the number of its template and its micro-batch.

    RECV v0#7 from 0      template 3: RECV v0#0 from 0,  micro-batch 7           numbers        3 5 6 3 5 6 3 5 6
    1F7 v0#7 -> @1#7      template 5: 1F0 v0#0 -> @1#0,  micro-batch 7           micro-batches  7 7 7 8 8 8 9 9 9

A row is a sequence of instructions, which are made when they are read. Its text has what is repeated once (`folded`):

    (
     RECV v0#7 from 0
     1F7 v0#7 -> @1#7
     FREE v0#7
    )x3+1                 three times, each time with micro-batches 1 later
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np
from numpy.typing import NDArray

from pipecompile.ir.action import Action
from pipecompile.ir.program import Instruction, Operand, Value

__all__ = ["InstructionGroup", "InstructionRow", "InstructionTable", "first_microbatch", "folded", "later_instruction"]

Ints = NDArray[np.int64]

_LONGEST = 64
"""Most instructions of a group: what is repeated at a longer distance is written out. It bounds the seconds of folding; no benchmark chose it."""


def first_microbatch(instruction: Instruction) -> int:
    """Return the micro-batch of the action, or of the first operand; 0 if there is neither."""
    if instruction.action is not None:
        return instruction.action.microbatch
    return next((operand.value.microbatch for operand in (*instruction.reads, *instruction.writes)), 0)


def later_instruction(one: Instruction, microbatches: int) -> Instruction:
    """Return the instruction with numbers of micro-batches higher by `microbatches`, without slots."""

    def moved(side: tuple[Operand, ...]) -> tuple[Operand, ...]:
        values = [operand.value for operand in side]
        return tuple([Operand(Value(v.name, v.microbatch + microbatches, v.consumer)) for v in values])

    action = one.action and Action(one.action.stage, one.action.kind, one.action.microbatch + microbatches)
    return Instruction(one.op, moved(one.reads), moved(one.writes), action, one.peer, one.tie, one.overlaps)


@dataclass(slots=True, eq=False)
class InstructionTable:
    """The templates of instructions, each at micro-batch 0, by their number. Templates are added and stay.

    `collectives` are the numbers of those without a micro-batch: BROADCAST and REDUCE.
    """

    templates: list[Instruction] = field(default_factory=list)
    numbers: dict[Instruction, int] = field(default_factory=dict)
    collectives: list[int] = field(default_factory=list)

    def number(self, template: Instruction) -> int:
        """Return the number of a template, which is added when it is new."""
        number = self.numbers.setdefault(template, len(self.templates))
        if number == len(self.templates):
            self.templates.append(template)
            if template.action is None and not (template.reads or template.writes):
                self.collectives.append(number)
        return number

    def row(self, instructions: Iterable[Instruction]) -> InstructionRow:
        """Return a row as arrays."""
        if isinstance(instructions, InstructionRow):
            return instructions.within(self)
        known = [(self.number(later_instruction(i, -(m := first_microbatch(i)))), m) for i in instructions]
        numbers, microbatches = np.array(known, dtype=np.int64).reshape(-1, 2).T
        return InstructionRow(self, numbers, microbatches)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class InstructionRow(Sequence[Instruction]):
    """A row of instructions without slots. It is equal to the tuple of them."""

    table: InstructionTable
    numbers: Ints
    microbatches: Ints

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Instruction]:
        templates = self.table.templates
        for number, microbatch in zip(self.numbers.tolist(), self.microbatches.tolist(), strict=True):
            yield later_instruction(templates[number], microbatch)

    @overload
    def __getitem__(self, index: int) -> Instruction: ...
    @overload
    def __getitem__(self, index: slice) -> InstructionRow: ...
    def __getitem__(self, index: int | slice) -> Instruction | InstructionRow:
        if isinstance(index, slice):
            return InstructionRow(self.table, self.numbers[index], self.microbatches[index])
        return later_instruction(self.table.templates[int(self.numbers[index])], int(self.microbatches[index]))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, InstructionRow):
            same = other.within(self.table)
            is_equal = np.array_equal(self.numbers, same.numbers)
            return is_equal and np.array_equal(self.microbatches, same.microbatches)
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"InstructionRow({len(self)} instructions)"

    def later(self, microbatches: int | Ints) -> InstructionRow:
        """Return the instructions with higher numbers of micro-batches: higher by one number, or one per instruction."""
        moved = self.microbatches + microbatches
        if self.table.collectives:
            moved[np.isin(self.numbers, self.table.collectives)] = 0
        return InstructionRow(self.table, self.numbers, moved)

    def distinct(self) -> Iterator[tuple[int, Instruction]]:
        """Yield (index, instruction) where each template comes first."""
        _, first = np.unique(self.numbers, return_index=True)
        return ((index, self[index]) for index in np.sort(first).tolist())

    def within(self, table: InstructionTable) -> InstructionRow:
        """Return the same row with the templates of another table."""
        if table is self.table:
            return self
        used = np.unique(self.numbers)
        number_of = np.zeros(len(self.table.templates), dtype=np.int64)
        number_of[used] = [table.number(self.table.templates[number]) for number in used.tolist()]
        return InstructionRow(table, number_of[self.numbers], self.microbatches)


@dataclass(frozen=True, slots=True)
class InstructionGroup:
    """Instructions `start` to `start + length` of a row, repeated `times` times, each time with micro-batches `step` later."""

    start: int
    length: int
    times: int
    step: int


def folded(row: InstructionRow) -> Iterator[InstructionGroup]:
    """Yield the row as groups, in order; what is not repeated is in groups of one instruction. A group shortens the text. Linear."""
    numbers, microbatches = row.numbers.tolist(), row.microbatches.tolist()
    following = _following(numbers)
    start = 0
    while start < len(numbers):
        length = following[start] - start
        times, step = 1, 0
        if length <= _LONGEST:
            step = microbatches[start + length] - microbatches[start]
            times = _repetitions(numbers, microbatches, start, length, step)
        if step < 1 or (times - 1) * length <= 2:
            length, times, step = 1, 1, 1
        yield InstructionGroup(start, length, times, step)
        start += length * times


def _following(numbers: Sequence[int]) -> list[int]:
    """Return, per instruction, the index of the next one with the same template, far beyond the row if there is none."""
    following, last = [0] * len(numbers), dict[int, int]()
    for index in range(len(numbers) - 1, -1, -1):
        following[index] = last.get(numbers[index], len(numbers) + index + _LONGEST + 1)
        last[numbers[index]] = index
    return following


def _repetitions(numbers: Sequence[int], microbatches: Sequence[int], start: int, length: int, step: int) -> int:
    """Return how often the instructions from `start` on follow each other, each time `step` later."""
    end = start + length
    while (
        end < len(numbers)
        and numbers[end] == numbers[end - length]
        and microbatches[end] - microbatches[end - length] == step
    ):
        end += 1
    return (end - start) // length
