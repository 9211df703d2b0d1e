"""An unrolled periodic program as arrays: all rows one after the other, and what each template of an instruction reads and writes.

    starts            0               8           row of device d: items starts[d] to starts[d + 1]
    numbers           3 5 6 3 5 6 4 7 ...         the template of each instruction
    micro-batches     0 0 0 1 1 1 0 0 ...

Passes and verifiers work on whole rows: a few operations on arrays per row in the place of some per instruction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from pipecompile.ir.action import Action, Kind
from pipecompile.ir.instruction_rows import InstructionRow, InstructionTable
from pipecompile.ir.periodic import PeriodicSchedule
from pipecompile.ir.program import Instruction, Op, Operand, Value
from pipecompile.ir.routes import Route

__all__ = [
    "KINDS",
    "OPS",
    "Lists",
    "ProgramArrays",
    "Templates",
    "as_lists",
    "listed",
    "unrolled_actions",
    "unrolled_row",
]

Ints = NDArray[np.int64]

OPS = {op: number for number, op in enumerate(Op)}
KINDS = {kind: number for number, kind in enumerate(Kind)}


def unrolled_row(parts: Sequence[Ints], count: int, step: int, later: Ints) -> Ints:
    """Return prologue, `count` periods and epilogue in one, shape (columns, items). `later` is 1 for columns with micro-batches, else 0."""
    before, period, after = parts
    which = np.repeat(np.arange(count), period.shape[1])
    middle = np.tile(period, count) + step * later[:, None] * which
    return np.concatenate([before, middle, after + step * count * later[:, None]], axis=1)


def unrolled_actions(schedule: PeriodicSchedule, count: int) -> list[Ints]:
    """Return, per device, (stage, number of the kind, micro-batch) of each action of `count` repetitions, shape (3, actions)."""
    parts, later = zip(schedule.prologue, schedule.period, schedule.epilogue, strict=True), np.array([0, 0, 1])
    return [unrolled_row([*map(action_columns, each)], count, schedule.step, later) for each in parts]


def action_columns(row: Sequence[Action]) -> Ints:
    """Return (stage, number of the kind, micro-batch) of each action, shape (3, actions)."""
    columns = [(a.stage, KINDS[a.kind], a.microbatch) for a in row]
    return np.array(columns, dtype=np.int64).reshape(-1, 3).T


Lists = tuple[Ints, Ints]
"""Lists of numbers: all of them one after the other, and where each list begins, with the end of the last."""


def as_lists(lists: Sequence[Sequence[int]]) -> Lists:
    """Return lists as two arrays."""
    items = [item for each in lists for item in each]
    return np.array(items, dtype=np.int64), np.array([0, *accumulate(map(len, lists))], dtype=np.int64)


def listed(lists: Lists, keys: Ints) -> tuple[Ints, Ints]:
    """Return (index in `keys`, item) of each item of the lists with these numbers, in order."""
    items, starts = lists
    counts = starts[keys + 1] - starts[keys]
    index = np.repeat(np.arange(len(keys)), counts)
    within = np.arange(len(index)) - (np.cumsum(counts) - counts)[index]
    return index, items[starts[keys][index] + within]


class Templates:
    """Columns with an item per template: `op`, `kind` (-1 for none), `stage`, `peer`, and the classes of operands.

    A class is a value of any micro-batch: (name, consumer).
    """

    def __init__(self, templates: Sequence[Instruction]) -> None:
        self.templates = templates
        self.classes: dict[tuple[str, int | None], int] = {}
        actions = [one.action for one in templates]
        self.op = np.array([OPS[one.op] for one in templates], dtype=np.int64)
        self.kind = np.array([-1 if a is None else KINDS[a.kind] for a in actions], dtype=np.int64)
        self.stage = np.array([-1 if a is None else a.stage for a in actions], dtype=np.int64)
        self.peer = np.array([-2 if one.peer is None else one.peer for one in templates], dtype=np.int64)
        self.reads = self._sides([one.reads for one in templates])
        self.writes = self._sides([one.writes for one in templates])

    def _sides(self, sides: Sequence[tuple[Operand, ...]]) -> Lists:
        """Return the classes of the operands of each template."""
        return as_lists([[self._class(operand.value) for operand in side] for side in sides])

    def _class(self, value: Value) -> int:
        return self.classes.setdefault((value.name, value.consumer), len(self.classes))

    @cached_property
    def message_class(self) -> Ints:
        """The class of what a SEND or RECV moves; -1 for other instructions."""
        result = np.full(len(self.op), -1)
        for op, (classes, starts) in ((Op.SEND, self.reads), (Op.RECV, self.writes)):
            own = np.flatnonzero(self.op == OPS[op])
            result[own] = classes[starts[own]]
        return result


@dataclass(slots=True)
class ProgramArrays:
    """A program of `n_microbatches`, with rows of templates of `table` and of micro-batches."""

    n_stages: int
    n_microbatches: int
    placement: tuple[int, ...]
    routes: tuple[Route, ...]
    table: InstructionTable
    rows: list[tuple[Ints, Ints]]

    @property
    def numbers(self) -> Ints:
        """The template of every instruction, row after row."""
        return np.concatenate([numbers for numbers, _ in self.rows])

    @property
    def microbatches(self) -> Ints:
        """The micro-batch of every instruction, row after row."""
        return np.concatenate([microbatches for _, microbatches in self.rows])

    @property
    def devices(self) -> Ints:
        """The device of every instruction, row after row."""
        return np.repeat(np.arange(len(self.rows)), [len(numbers) for numbers, _ in self.rows])

    def row(self, device: int) -> InstructionRow:
        """Return the row of a device."""
        return InstructionRow(self.table, *self.rows[device])
