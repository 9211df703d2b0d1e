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

Its size does not depend on the number of micro-batches. The micro-batches of the epilogue are those of no repetition. Operands have no
slots: a value of the next repetition need not lie where that of the last did. `passes.periodic_lowering.unroll` assigns them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipecompile.errors import InputError, ScheduleError
from pipecompile.ir.action import Action
from pipecompile.ir.input_checks import whole
from pipecompile.ir.periodic import MOST_REPETITIONS, check_unrolled
from pipecompile.ir.program import Instruction, Operand, Program, Value
from pipecompile.ir.program_text import parse_program
from pipecompile.ir.routes import Route, Tie
from pipecompile.ir.text_file import save_text

__all__ = ["PeriodicProgram", "is_later", "later"]

Rows = tuple[tuple[Instruction, ...], ...]

PARTS = ("prologue", "period", "epilogue")


def later(row: Sequence[Instruction], microbatches: int) -> tuple[Instruction, ...]:
    """Return the instructions on micro-batches that are so many later, without slots."""
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


def is_later(row: Sequence[Instruction], other: Sequence[Instruction], microbatches: int) -> bool:
    """Return whether instructions are the others on micro-batches that are so many later, whatever their slots."""
    return len(row) == len(other) and all(_is_later(a, b, microbatches) for a, b in zip(row, other, strict=True))


def _is_later(one: Instruction, other: Instruction, microbatches: int) -> bool:
    a, b = one.action, other.action
    if a is not None and b is not None:
        is_action = (a.stage, a.kind, a.microbatch) == (b.stage, b.kind, b.microbatch + microbatches)
    else:
        is_action = a is b
    return (
        is_action
        and (one.op, one.peer, one.tie, one.overlaps) == (other.op, other.peer, other.tie, other.overlaps)
        and (len(one.reads), len(one.writes)) == (len(other.reads), len(other.writes))
        and all(
            (c.value.name, c.value.microbatch, c.value.consumer)
            == (d.value.name, d.value.microbatch + microbatches, d.value.consumer)
            for c, d in zip((*one.reads, *one.writes), (*other.reads, *other.writes), strict=True)
        )
    )


@dataclass(frozen=True, slots=True)
class PeriodicProgram:
    """Per device `prologue`, then `period` so many `repetitions`, each with micro-batches `step` later, then `epilogue`."""

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
        rows = (*self.prologue, *self.epilogue)
        actions = (i.action for row in rows for i in row if i.action is not None)
        return len({action.microbatch for action in actions if action.stage == 0}) + self.step * self.repetitions

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
                lines += (f"  {instruction}" for instruction in getattr(self, part)[device])
        return "\n".join(lines) + "\n"

    def save(self, path: str | Path) -> None:
        """Write `str(program)` to a file. Raise InputError if it cannot be written."""
        save_text(path, str(self))

    @classmethod
    def from_text(cls, text: str) -> PeriodicProgram:
        """Read the form of `str`. Raise ScheduleError naming what cannot be read, or counts that contradict the parts."""
        if not isinstance(text, str):
            raise InputError(f"a {type(text).__name__} is no text of a program", hint="Path(path).read_text()")
        first, _, rest = text.partition("\n")
        header = _HEADER.fullmatch(first.strip())
        if header is None:
            why = "its first line is 'periodic program: 2 stages on devices 0 1, 4 micro-batches, 3 times 1 later'"
            raise ScheduleError("the text holds no periodic program", why=why)
        whole_text, cuts = _without_parts(rest, header[1])
        program = parse_program(whole_text)
        parts = [_cut(row, cut) for row, cut in zip(program.rows, cuts, strict=True)]
        prologue, period, epilogue = (tuple(each[index] for each in parts) for index in range(3))
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


def _without_parts(text: str, header: str) -> tuple[str, list[list[int]]]:
    """Return the text of a program with the rows of all parts, and per row the numbers of instructions before each part."""
    lines, cuts, count = [f"{header}1 micro-batches"], list[list[int]](), 0
    for line in text.split("\n"):
        name = line.strip()
        if name.startswith("device "):
            cuts.append([])
            count = 0
        elif name in PARTS:
            if not cuts or len(cuts[-1]) != PARTS.index(name):
                raise ScheduleError(f"{name!r} is out of place", why="each device has prologue, period and epilogue")
            cuts[-1].append(count)
            continue
        elif name and cuts:
            count += 1
        lines.append(line)
    if any(len(cut) != len(PARTS) or cut[0] for cut in cuts):
        raise ScheduleError("a device has no prologue, period and epilogue", why="each device has them, in this order")
    return "\n".join(lines), cuts


def _cut(row: Sequence[Instruction], cut: Sequence[int]) -> tuple[tuple[Instruction, ...], ...]:
    return tuple(row[: cut[1]]), tuple(row[cut[1] : cut[2]]), tuple(row[cut[2] :])
