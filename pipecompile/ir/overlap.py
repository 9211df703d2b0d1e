"""Overlapped actions: a forward and a backward of two cells that a device runs at the same time, each hiding what the other waits for.

    0F2,(1F0;0B1)OVERLAP_F_B,1B0      one cell of a row: the text form is that of torch.distributed.pipelining

A pair begins when everything that either action reads is there, and the values of both are there when it ends. In a schedule the
two are neighbours in their row, and `Schedule.overlaps` has the pair. In a program `OVERLAP` stands before the first of the two
instructions.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from pipecompile.ir.action import BACKWARDS, Action, Kind

__all__ = ["Pair", "firsts", "grouped", "in_order", "is_pair", "parse_cell", "written_cells"]

Pair = tuple[Action, Action]
"""Two neighbours of a row that overlap: F, and then B or I. Where one runs after the other, as on CPUs, F is the first."""

_CELL = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def is_pair(parts: Sequence[Action]) -> bool:
    """Return whether these are F, and then B or I."""
    return len(parts) == 2 and parts[0].kind is Kind.FORWARD and parts[1].kind in BACKWARDS


def parse_cell(text: str) -> tuple[Action, ...]:
    """Return the action of a cell, or all actions of a cell of OVERLAP_F_B. Raise ScheduleError if it is neither."""
    overlap = _CELL.fullmatch(text)
    return (Action.parse(text),) if overlap is None else tuple(Action.parse(p.strip()) for p in overlap[1].split(";"))


def in_order(parts: Sequence[Action]) -> tuple[Action, ...]:
    """Return the actions of a cell with F before B or I, if these are the two."""
    return (parts[1], parts[0]) if is_pair(parts[::-1]) else tuple(parts)


def firsts(overlaps: Collection[Pair]) -> frozenset[Action]:
    """Return the first action of each pair: no pass may put anything directly behind it."""
    return frozenset(first for first, _ in overlaps)


def grouped(row: Sequence[Action], overlaps: Collection[Pair]) -> Iterator[Sequence[Action]]:
    """Yield the cells of a row: one action each, or two that overlap."""
    index = 0
    while index < len(row):
        size = 1 + (tuple(row[index : index + 2]) in overlaps)
        yield row[index : index + size]
        index += size


def written_cells(row: Sequence[Action], overlaps: Collection[Pair]) -> Iterator[str]:
    """Yield the texts of the cells of a row."""
    if not overlaps:
        return map(str, row)
    return (
        str(cell[0]) if len(cell) == 1 else f"({';'.join(map(str, cell))})OVERLAP_F_B"
        for cell in grouped(row, overlaps)
    )
