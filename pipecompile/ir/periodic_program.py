"""A periodic program: per device a prologue, a period that is repeated with later micro-batches, and an epilogue.

    periodic program: 2 stages on devices 0 1, 4 micro-batches, 3 times 1 later
    route v0: 0 -> 1, 0 bytes, gradient
    device 0
     prologue
      0F0 -> v0#0 @0#0
      ...
     period
      0F1 -> v0#1 @0#1
      ...
     epilogue
      RECV v0'1#0 from 1
      ...

Its size does not depend on the number of micro-batches, and what a part repeats is written once (`periodic_text.py`). The micro-batches of the epilogue are those of no repetition. Operands have no
slots: a value of the next repetition need not lie where that of the last did. `passes.periodic_lowering.unroll` assigns them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pipecompile.errors import InputError, ScheduleError
from pipecompile.ir.action import Action
from pipecompile.ir.instruction_rows import InstructionRow, InstructionTable
from pipecompile.ir.periodic import MOST_REPETITIONS, check_unrolled
from pipecompile.ir.periodic_text import PARTS, read_parts, row_lines, without_marks
from pipecompile.ir.program import Instruction, Operand, Program, Value
from pipecompile.ir.program_arrays import ProgramArrays, unrolled_row
from pipecompile.ir.program_text import parse_program
from pipecompile.ir.routes import Route, Tie
from pipecompile.text.input_checks import whole
from pipecompile.text.shown_value import type_text
from pipecompile.text.text_file import save_text

__all__ = ["PARTS", "PeriodicProgram", "later"]

Rows = tuple[Sequence[Instruction], ...]
"""Per device a tuple of instructions, or an InstructionRow."""

_LATER = np.array([0, 1])
"""The rows of arrays that are shifted: templates stay, micro-batches come later."""


def later(row: Sequence[Instruction], microbatches: int) -> tuple[Instruction, ...]:
    """Return the instructions with numbers of micro-batches higher by `microbatches`, without slots."""
    if isinstance(row, InstructionRow):
        return tuple(row.later(microbatches))
    moved: dict[
        int, Operand
    ] = {}  # by identity: the instructions of a row share operands, and hashing takes longer than the rest

    def operands(side: tuple[Operand, ...]) -> tuple[Operand, ...]:
        for operand in side:
            if id(operand) not in moved:
                value = operand.value
                moved[id(operand)] = Operand(Value(value.name, value.microbatch + microbatches, value.consumer))
        return tuple([moved[id(operand)] for operand in side])

    return tuple(
        [
            Instruction(
                i.op, operands(i.reads), operands(i.writes),
                i.action and Action(i.action.stage, i.action.kind, i.action.microbatch + microbatches),
                i.peer, i.tie, i.overlaps,
            )
            for i in row
        ]
    )  # fmt: skip


def _of_first_stage(row: Sequence[Instruction]) -> set[int]:
    """Return the micro-batches of the actions of stage 0."""
    if isinstance(row, InstructionRow):
        own = {number for number, one in enumerate(row.table.templates) if one.action and one.action.stage == 0}
        pairs = zip(row.numbers.tolist(), row.microbatches.tolist(), strict=True)
        return {microbatch for number, microbatch in pairs if number in own}
    actions = (i.action for i in row if i.action is not None)
    return {action.microbatch for action in actions if action.stage == 0}


@dataclass(frozen=True, slots=True)
class PeriodicProgram:
    """Per device `prologue`, then `period`, `repetitions` times, each time with micro-batches `step` later, then `epilogue`."""

    n_stages: int
    placement: tuple[int, ...]
    routes: tuple[Route, ...]
    prologue: Rows
    period: Rows
    epilogue: Rows
    repetitions: int
    step: int
    ties: tuple[Tie, ...] = ()

    @property
    def n_devices(self) -> int:
        """Number of pipeline devices."""
        return len(self.period)

    @property
    def n_microbatches(self) -> int:
        rest = {m for row in (*self.prologue, *self.epilogue) for m in _of_first_stage(row)}
        return len(rest) + self.step * self.repetitions

    def __repr__(self) -> str:
        counts = f"n_stages={self.n_stages}, n_microbatches={self.n_microbatches}, n_devices={self.n_devices}"
        return f"PeriodicProgram({counts}, {self.repetitions} times {self.step})"

    def repeated(self, repetitions: int) -> PeriodicProgram:
        """Return the program with another number of repetitions."""
        return replace(self, repetitions=whole("repetitions", repetitions, 1, MOST_REPETITIONS))

    def unrolled(self, repetitions: int | None = None) -> Program:
        """Return the program without slots, with the number of repetitions of this one or another."""
        count = self.repetitions if repetitions is None else whole("repetitions", repetitions, 1)
        check_unrolled(self.period, count)
        rows = tuple(tuple(self._row(device, count)) for device in range(self.n_devices))
        n_microbatches = self.n_microbatches + self.step * (count - self.repetitions)
        return Program(self.n_stages, n_microbatches, self.placement, self.routes, rows, self.ties)

    def arrays(self, repetitions: int) -> ProgramArrays:
        """Return the program as arrays, with `repetitions` repetitions, each with micro-batches `step` later."""
        first = next((row for row in self.prologue if isinstance(row, InstructionRow)), None)
        table = InstructionTable() if first is None else first.table
        rows = []
        for parts in zip(self.prologue, self.period, self.epilogue, strict=True):
            columns = [np.stack([part.numbers, part.microbatches]) for part in map(table.row, parts)]
            numbers, microbatches = unrolled_row(columns, repetitions, self.step, _LATER)
            rows.append((numbers, microbatches))
        n_microbatches = self.n_microbatches + self.step * (repetitions - self.repetitions)
        return ProgramArrays(self.n_stages, n_microbatches, self.placement, self.routes, table, rows)

    def _row(self, device: int, count: int) -> Iterator[Instruction]:
        yield from self.prologue[device]
        for index in range(count):
            yield from later(self.period[device], self.step * index)
        yield from later(self.epilogue[device], self.step * count)

    def __str__(self) -> str:
        """Return the text that `from_text` reads."""
        placement = "".join(f" {device}" for device in self.placement)
        counts = f"{self.n_microbatches} micro-batches, {self.repetitions} times {self.step} later"
        lines = [f"periodic program: {self.n_stages} stages on devices{placement}, {counts}"]
        lines += map(str, (*self.routes, *self.ties))
        for device in range(self.n_devices):
            lines.append(f"device {device}")
            for part in PARTS:
                lines.append(f" {part}")
                lines += row_lines(getattr(self, part)[device])
        return "\n".join(lines) + "\n"

    def save(self, path: str | Path) -> None:
        """Write `str(program)` to a file. Raise InputError if it cannot be written."""
        save_text(path, str(self))

    @classmethod
    def from_text(cls, text: str) -> PeriodicProgram:
        """Read the form of `str`. Raise ScheduleError naming what cannot be read, or counts that contradict the parts."""
        if not isinstance(text, str):
            raise InputError(f"{type_text(text)} is not the text of a program", hint="Path(path).read_text()")
        first, _, rest = text.partition("\n")
        header = _HEADER.fullmatch(first.strip())
        if header is None:
            why = "its first line is 'periodic program: 2 stages on devices 0 1, 4 micro-batches, 3 times 1 later'"
            raise ScheduleError("the text holds no periodic program", why=why)
        program = parse_program(without_marks(f"{header[1]}1 micro-batches\n{rest}"))
        prologue, period, epilogue = read_parts(rest, program.rows)
        found = cls(
            program.n_stages, program.placement, program.routes, prologue, period, epilogue, int(header[2]),
            int(header[3]), program.ties,
        )  # fmt: skip
        if found.n_microbatches != int(header[4]):
            why = f"its parts have {found.n_microbatches}"
            raise ScheduleError(f"the first line says {header[4]} micro-batches", where="line 1", why=why)
        return found


_HEADER = re.compile(
    r"periodic (program: [0-9]{1,9} stages on devices[0-9 ]*, )(?=[0-9]{1,9} micro-batches, ([0-9]{1,9}) times ([0-9]{1,9}) later)([0-9]{1,9}) micro-batches, .*"
)
