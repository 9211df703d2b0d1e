"""The parser of a schedule's rows from CSV: ours, written by hand, or dumped by torch.distributed.pipelining.

    0F0,,0F1                                a row per device, a cell per action; an empty cell is an idle tick
    ,                                       a device without actions
    0UNSHARD,0F0,0SEND_F0,0WAIT_SEND_F0     torch, with communication: messages and waits are skipped; the rest keeps its order
    (0F1;0B0)x7+1                           7 times, each time with micro-batches 1 later (`periodic.py`)
    (0F2;1B0)OVERLAP_F_B                    a forward and a backward at the same time; other kinds: one after the other
    0F0.0,0F0.1                             slices of a micro-batch (`slices.py`): all actions have one, or none has

Blank lines at the end and a byte-order mark are skipped. A blank line before another row is refused, and so are B and W of one
stage and micro-batch: torch 2.5 and older wrote B where I is meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from pipecompile.errors import InputError, ScheduleError
from pipecompile.ir.action import Action, Kind
from pipecompile.ir.overlap import parse_cell
from pipecompile.text.input_checks import without_mark
from pipecompile.text.shown_value import type_text

__all__ = ["Repeated", "csv_lines", "parse_repeated", "read_rows", "row_place"]

Rows = list[list[tuple[Action, ...]]]
"""Per row its cells, each with one action, or with all actions that overlap."""

_SHOWN = 8
"""Number of unreadable cells listed after the first. A file that is not a schedule has thousands."""

_COMMUNICATION = re.compile(r"[0-9]{1,9}(?:(?:SEND_[FB]|RECV_[FB]|WAIT_SEND_[FB])[0-9]{1,9}|WAIT_REDUCE_GRAD)")


_REPEATED = re.compile(r"\(([^()]*)\)x([0-9]{1,9})\+([0-9]{1,9})")
_MOST_ACTIONS = 100_000_000
"""Actions of a text with repeated cells; a schedule has at most 50 million cells, each with one action or two."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """A cell of actions that are repeated so often, each time with micro-batches that are `step` later."""

    actions: tuple[Action, ...]
    count: int
    step: int


def parse_repeated(text: str) -> Repeated | None:
    """Return the repeated actions of a cell; None for another cell. Raise ScheduleError if a part of it is not an action."""
    match = _REPEATED.fullmatch(text)
    if match is None:
        return None
    actions = tuple(Action.parse(part.strip()) for part in match[1].split(";"))
    if len(actions) * int(match[2]) > _MOST_ACTIONS:
        raise ScheduleError(f"{text:.60} is repeated too often", why=f"at most {_MOST_ACTIONS:,} actions can be read")
    return Repeated(actions, int(match[2]), int(match[3]))


def _unrolled(cell: Repeated) -> Iterator[tuple[Action, ...]]:
    for index in range(cell.count):
        yield from ((action.later(index * cell.step),) for action in cell.actions)


def read_rows(text: str) -> Rows:
    """Return the cells of every line. Raise ScheduleError naming row, line and cell of every cell that cannot be read."""
    lines = csv_lines(text)
    faults: list[tuple[str, ScheduleError]] = []
    rows = [list(_row(line, number, faults)) for number, line in enumerate(lines)]
    if faults:
        (where, first), others = faults[0], faults[1:]
        more = "".join(f"\n         {place}: {error.what}" for place, error in others[:_SHOWN])
        more += f"\n         and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        raise ScheduleError(first.what, where=where + more, why=first.why, hint=first.hint)
    _check_backwards(rows)
    return rows


def csv_lines(text: str) -> list[str]:
    """Return the lines of the rows. Raise ScheduleError for a blank line before another row."""
    if not isinstance(text, str):
        raise InputError(f"{type_text(text)} is not text with rows", hint="Schedule.from_csv(Path(path).read_text())")
    lines = without_mark(text).rstrip().split("\n")
    for number, line in enumerate(lines if len(lines) > 1 else ()):
        if not line.strip():
            raise ScheduleError(
                "a line is blank", where=f"line {number + 1}", why="every line is the row of a device",
                hint="remove the line, or write a comma for a device without actions",
            )  # fmt: skip
    return lines


def row_place(row: int) -> str:
    """Return the place of a row in a message: devices count from 0, lines and cells from 1."""
    return f"row {row} (line {row + 1})"


def _row(line: str, row: int, faults: list[tuple[str, ScheduleError]]) -> Iterator[tuple[Action, ...]]:
    for column, cell in enumerate(line.split(",")):
        try:
            if not (text := cell.strip()) or _COMMUNICATION.fullmatch(text) is not None:
                continue
            if (repeated := parse_repeated(text)) is not None:
                yield from _unrolled(repeated)
            else:
                yield parse_cell(text)
        except ScheduleError as error:
            faults.append((f"{row_place(row)}, cell {column + 1}", error))


def _check_backwards(rows: Rows) -> None:
    """Raise ScheduleError for the first W of a stage and micro-batch that has a B."""
    whole = {a.cell for row in rows for parts in row for a in parts if a.kind is Kind.BACKWARD}
    for number, row in enumerate(rows):
        for action in (each for parts in row for each in parts):
            if action.kind is Kind.WEIGHT_GRAD and action.cell in whole:
                both = f"{action.stage}B{action.part}"
                raise ScheduleError(
                    f"{both} and {action} are both there", where=row_place(number), why="B has the work of I and W",
                    hint=f"{both.replace('B', 'I')} instead of {both}, as files of torch 2.5 and older mean it",
                )  # fmt: skip
