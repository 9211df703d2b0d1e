"""The parser of a schedule's rows from CSV: ours, written by hand, or dumped by torch.distributed.pipelining.

    0F0,,0F1                                a row per device, a cell per action; an empty cell is an idle tick
    0UNSHARD,0F0,0SEND_F0,0WAIT_SEND_F0     torch, with communication: skipped; computation keeps its order
    (0F2;1B0)OVERLAP_F_B                    torch, two actions that may overlap: one after the other

torch 2.5 and older wrote B for the input gradient of a cell with a W. A file with W and without I is read that way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from pipecompile.errors import ScheduleError
from pipecompile.ir.action import Action, Kind

__all__ = ["read_rows"]

Rows = list[list[Action]]

_SHOWN = 8
"""Number of unreadable cells listed after the first. A file that is no schedule has thousands."""

_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_COMMUNICATION = re.compile(
    r"[0-9]{1,9}(?:(?:SEND_[FB]|RECV_[FB]|WAIT_SEND_[FB])[0-9]{1,9}|UNSHARD|RESHARD|REDUCE_GRAD|WAIT_REDUCE_GRAD)"
)


def read_rows(text: str) -> Rows:
    """Return the actions of every line. Raise ScheduleError naming row and column of every cell that cannot be read."""
    lines = text.removesuffix("\n").split("\n")
    faults: list[tuple[str, ScheduleError]] = []
    rows = [list(_row(line, number, faults)) for number, line in enumerate(lines)]
    if faults:
        (where, first), others = faults[0], faults[1:]
        more = "".join(f"\n         {place}: {error.what}" for place, error in others[:_SHOWN])
        more += f"\n         and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        raise ScheduleError(first.what, where=where + more, why=first.why, hint=first.hint)
    return _with_input_grads(rows)


def _row(line: str, row: int, faults: list[tuple[str, ScheduleError]]) -> Iterator[Action]:
    for column, cell in enumerate(line.split(",")):
        try:
            yield from _cell(cell.strip())
        except ScheduleError as error:
            faults.append((f"row {row}, column {column}", error))


def _cell(cell: str) -> Iterator[Action]:
    overlap = _OVERLAP.fullmatch(cell)
    if overlap is not None:
        for part in overlap[1].split(";"):
            yield from _cell(part.strip())
    elif cell and _COMMUNICATION.fullmatch(cell) is None:
        yield Action.parse(cell)


def _with_input_grads(rows: Rows) -> Rows:
    """Replace B by I in every cell that has a W, unless the file contains an I."""
    kinds = {action.kind for row in rows for action in row}
    if Kind.WEIGHT_GRAD not in kinds or Kind.INPUT_GRAD in kinds:
        return rows
    split = {(a.stage, a.microbatch) for row in rows for a in row if a.kind is Kind.WEIGHT_GRAD}
    return [[_as_input_grad(a) if (a.stage, a.microbatch) in split else a for a in row] for row in rows]


def _as_input_grad(action: Action) -> Action:
    return replace(action, kind=Kind.INPUT_GRAD) if action.kind is Kind.BACKWARD else action
