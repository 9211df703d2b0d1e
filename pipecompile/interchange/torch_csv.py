"""The CSV of torch.distributed.pipelining, compute-only or with communication, as a `PipelineOrder`: nothing is dropped.

0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD        a line per rank
(0F2;3B0)OVERLAP_F_B,,0B1                              two cells that may overlap; an idle tick
"""

from __future__ import annotations

import re

from pipecompile.errors import ScheduleError
from pipecompile.interchange.pipeline_order import EMPTY, OrderCell, PipelineOrder
from pipecompile.ir.schedule_csv import csv_lines

__all__ = ["parse_cell", "parse_torch_csv"]

_SHOWN = 8
_NUMBER = "[0-9]{1,9}"
_CELL = re.compile(
    rf"({_NUMBER})(?:((?:SEND_|RECV_|WAIT_SEND_)?[FB]|[IWR])({_NUMBER})|(UNSHARD|RESHARD|(?:WAIT_)?REDUCE_GRAD))"
)
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_HINT = "0F0, 0B0, 0I0, 0W0, 0SEND_F0, 1RECV_F0, 0WAIT_SEND_F0, 0UNSHARD, 0REDUCE_GRAD or (0F1;0B0)OVERLAP_F_B"


def parse_torch_csv(text: str, name: str = "csv") -> PipelineOrder:
    """Return the order whose `str` is `text`. Raise ScheduleError naming line and cell of what cannot be read."""
    rows: list[tuple[OrderCell, ...]] = []
    faults: list[str] = []
    for number, line in enumerate(csv_lines(text)):
        row: list[OrderCell] = []
        for column, cell in enumerate(line.split(",")):
            try:
                row.append(parse_cell(cell.strip()))
            except ScheduleError as error:
                faults.append(f"line {number + 1}, cell {column + 1}: {error.what}")
        rows.append(tuple(row) if any(cell.op for cell in row) else ())
    if faults:
        more = faults[1:_SHOWN] + ([f"and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else [])
        raise ScheduleError(faults[0], where="\n         ".join(more), hint=_HINT)
    if not any(cell.actions for row in rows for cell in row):
        raise ScheduleError("there is no action", hint="write one line per rank, such as 0F0,0F1,0B0,0B1")
    return PipelineOrder(tuple(rows), name)


def parse_cell(text: str) -> OrderCell:
    """Return the cell whose `str` is `text`; an empty text is an idle tick. Raise ScheduleError for other texts."""
    if not text:
        return EMPTY
    overlap = _OVERLAP.fullmatch(text)
    if overlap is not None:
        parts = tuple(parse_cell(part.strip()) for part in overlap[1].split(";"))
        if all(part.actions and not part.parts for part in parts):
            return OrderCell(-1, "OVERLAP_F_B", None, parts)
        raise ScheduleError(f"{text!r} overlaps an action that computes nothing")
    match = _CELL.fullmatch(text)
    if match is None:
        raise ScheduleError(f"{text!r} is not a cell of a pipeline", hint=_HINT)
    return OrderCell(int(match[1]), match[2] or match[4], None if match[3] is None else int(match[3]))
