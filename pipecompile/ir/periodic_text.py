"""The text of the rows of a periodic program: three parts per device, in which groups of instructions are repeated.

    device 0
     prologue
      (
       0F0 -> v0#0 @0#0
       SEND v0#0 to 1
       FREE v0#0
      )x511+1
     period
      ...

A group `)x511+1` is there 511 times, each time with micro-batches 1 later. So the prologue of 1f1b is as short on 512 devices as on 4.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from pipecompile.errors import ScheduleError
from pipecompile.ir.instruction_rows import InstructionGroup, InstructionRow, InstructionTable, folded
from pipecompile.ir.program import Instruction
from pipecompile.text.shown_value import shown

__all__ = ["PARTS", "read_parts", "row_lines", "without_marks"]

PARTS = ("prologue", "period", "epilogue")

_GROUP_END = re.compile(r"\)x([0-9]{1,9})\+([0-9]{1,9})")

_MOST = 100_000_000
"""Instructions of all groups of a text."""


def row_lines(row: Sequence[Instruction]) -> Iterator[str]:
    """Yield the lines of a part of a row."""
    whole = row if isinstance(row, InstructionRow) else InstructionTable().row(row)
    for group in folded(whole):
        items = whole[group.start : group.start + group.length]
        if group.times == 1:
            yield from (f"  {instruction}" for instruction in items)
        else:
            yield "  ("
            yield from (f"   {instruction}" for instruction in items)
            yield f"  )x{group.times}+{group.step}"


def without_marks(text: str) -> str:
    """Return the text of a program with the instructions of all parts, and an empty line in the place of each other line."""
    return "\n".join("" if _is_mark(line.strip()) else line for line in text.split("\n"))


def _is_mark(line: str) -> bool:
    return line in PARTS or line == "(" or line.startswith(")")


@dataclass(slots=True)
class _RowMarks:
    """The beginnings of the parts of a row, and its groups, counted in the instructions that are written."""

    count: int = 0
    cuts: list[int] = field(default_factory=list)
    groups: list[InstructionGroup] = field(default_factory=list)
    open: int | None = None

    def mark(self, line: str, place: str) -> None:
        """Note a line that is not an instruction. Raise ScheduleError if it is out of place."""
        if line in PARTS:
            if len(self.cuts) != PARTS.index(line) or self.open is not None:
                raise ScheduleError(f"{line!r} is out of place", where=place, why=_EACH)
            self.cuts.append(self.count)
        elif line == "(":
            if self.open is not None:
                raise ScheduleError("'(' is out of place", where=place, why="a group has no other inside")
            self.open = self.count
        else:
            self._close(line, place)

    def _close(self, line: str, place: str) -> None:
        match = _GROUP_END.fullmatch(line)
        if match is None or self.open is None or self.open == self.count:
            why = "a group is '(', its instructions, and ')x3+1'"
            raise ScheduleError(f"{shown(line)} ends no group", where=place, why=why)
        times, step = int(match[1]), int(match[2])
        if not (times and step and times * (self.count - self.open) <= _MOST):
            raise ScheduleError(
                f"{line} is not a number of repetitions", where=place, why="as in )x3+1: three, 1 later each"
            )
        self.groups.append(InstructionGroup(self.open, self.count - self.open, times, step))
        self.open = None


_EACH = "each device has prologue, period and epilogue, in this order"


def read_parts(text: str, rows: Sequence[Sequence[Instruction]]) -> list[tuple[InstructionRow, ...]]:
    """Return prologue, period and epilogue of all devices. `rows` has the instructions that the text has per device, each once.

    Raise ScheduleError for a part or a group that is out of place.
    """
    marks = _marks(text)
    if any(len(mark.cuts) != len(PARTS) or mark.cuts[0] or mark.open is not None for mark in marks):
        raise ScheduleError("a device has no prologue, period and epilogue", why=_EACH)
    table = InstructionTable()
    parts = [_expanded(table.row(row), mark) for row, mark in zip(rows, marks, strict=True)]
    return [tuple(part[index] for part in parts) for index in range(len(PARTS))]


def _marks(text: str) -> list[_RowMarks]:
    rows: list[_RowMarks] = []
    total = 0
    for number, line in enumerate(map(str.strip, text.split("\n")), 2):
        if line.startswith("device "):
            rows.append(_RowMarks())
        elif _is_mark(line):
            if not rows:
                raise ScheduleError(f"{line!r} is out of place", where=f"line {number}", why=_EACH)
            rows[-1].mark(line, f"line {number}")
            total += rows[-1].groups[-1].length * rows[-1].groups[-1].times if line[0] == ")" else 0
            if total > _MOST:
                why = f"all groups together have at most {_MOST:,} instructions"
                raise ScheduleError(f"{line} repeats too much", where=f"line {number}", why=why)
        elif line and rows:
            rows[-1].count += 1
    return rows


def _expanded(row: InstructionRow, mark: _RowMarks) -> list[InstructionRow]:
    """Return the parts of a row with all repetitions of its groups."""
    of_start = {group.start: group for group in mark.groups}
    parts = []
    for start, stop in zip(mark.cuts, [*mark.cuts[1:], len(row)], strict=True):
        index, later = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        place = start
        while place < stop:
            group = of_start.get(place, InstructionGroup(place, 1, 1, 1))
            index.append(np.tile(np.arange(place, place + group.length), group.times))
            later.append(np.repeat(np.arange(group.times) * group.step, group.length))
            place += group.length
        own = np.concatenate(index)
        written = InstructionRow(row.table, row.numbers[own], row.microbatches[own])
        parts.append(written.later(np.concatenate(later)))
    return parts
