"""A pipeline as a file has it: per rank the cells in their order, communication included.

cell := STAGE OP [MICROBATCH] | "(" cell (";" cell)* ")OVERLAP_F_B" | nothing, an idle tick
OP   := F B I W R, SEND_F RECV_F SEND_B RECV_B WAIT_SEND_F WAIT_SEND_B, UNSHARD RESHARD REDUCE_GRAD WAIT_REDUCE_GRAD

    0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0WAIT_SEND_F0,0REDUCE_GRAD      rank 0
    1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0                            rank 1

`str` is the CSV of torch.distributed.pipelining, and is parsed back to an equal order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipecompile.errors import InputError
from pipecompile.ir import SHARDING, Action, Kind, Schedule
from pipecompile.ir.directions import check_one_direction
from pipecompile.ir.overlap import grouped
from pipecompile.ir.slices import check_whole
from pipecompile.text.input_checks import file_path
from pipecompile.text.shown_value import type_text
from pipecompile.text.text_file import cause_of

__all__ = ["COMPUTE_OPS", "EMPTY", "OrderCell", "PipelineOrder", "as_order", "order_of_schedule"]

COMPUTE_OPS = frozenset(kind.value for kind in Kind if kind not in SHARDING)
_TRANSFERS = frozenset({"SEND_F", "RECV_F", "SEND_B", "RECV_B"})


@dataclass(frozen=True, slots=True)
class OrderCell:
    """One cell of a file: `2RECV_F0` is the receipt of what stage 2 reads for micro-batch 0.

    `parts` are the cells inside OVERLAP_F_B, whose own stage is -1. `microbatch` is None for cells of a whole stage. An idle tick
    has the op "".
    """

    stage: int
    op: str
    microbatch: int | None = None
    parts: tuple[OrderCell, ...] = ()

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.op}"
        return f"{self.stage}{self.op}{'' if self.microbatch is None else self.microbatch}" if self.op else ""

    @property
    def actions(self) -> tuple[Action, ...]:
        """The computations of the cell, in order; none for communication, sharding and idle ticks."""
        if self.parts:
            return tuple(action for part in self.parts for action in part.actions)
        if self.op not in COMPUTE_OPS or self.microbatch is None:
            return ()
        return (Action(self.stage, Kind(self.op), self.microbatch),)

    @property
    def is_send(self) -> bool:
        return self.op in ("SEND_F", "SEND_B")

    @property
    def is_transfer(self) -> bool:
        return self.op in _TRANSFERS

    @property
    def partner(self) -> OrderCell:
        """The cell on the other rank that a send or a receive meets."""
        forward, step = self.op.endswith("F"), 1 if self.is_send else -1
        op = ("RECV_" if self.is_send else "SEND_") + self.op[-1]
        return OrderCell(self.stage + (step if forward else -step), op, self.microbatch)


EMPTY = OrderCell(-1, "")


@dataclass(frozen=True, slots=True)
class PipelineOrder:
    """Per rank, the cells of a pipeline that another framework wrote.

    `schedule` has the computations alone, for `verify`, `simulate` and `compile`. `weights[s]` is the time of a forward of
    stage s relative to the others; empty if the file does not say. `source` names the format. Neither counts for equality.
    """

    rows: tuple[tuple[OrderCell, ...], ...]
    name: str = field(default="custom", compare=False)
    source: str = field(default="torch", compare=False)
    weights: tuple[float, ...] = field(default=(), compare=False)

    @property
    def n_ranks(self) -> int:
        """Number of ranks."""
        return len(self.rows)

    @property
    def has_communication(self) -> bool:
        """Return whether the file says when values are sent and received."""
        return any(cell.is_transfer for row in self.rows for cell in row)

    @property
    def schedule(self) -> Schedule:
        """The computations alone, those of OVERLAP_F_B as a pair. Raise ScheduleError if a stage is on two ranks or on none."""
        schedule = Schedule.from_rows(([cell.actions for cell in row] for row in self.rows), self.name)
        check_one_direction(schedule, "other frameworks run a stage on one rank")
        return schedule

    def cells(self) -> Iterator[tuple[int, int, OrderCell]]:
        """Yield rank, index in the row, and cell, for all cells."""
        for rank, row in enumerate(self.rows):
            for index, cell in enumerate(row):
                yield rank, index, cell

    def to_csv(self) -> str:
        """Return one line per rank, one cell per action: the form of torch.distributed.pipelining. An empty row is a comma."""
        return "".join((",".join(map(str, row)) or ",") + "\n" for row in self.rows)

    __str__ = to_csv

    def __repr__(self) -> str:
        kind = "with" if self.has_communication else "without"
        return f"PipelineOrder({self.name!r}, n_ranks={self.n_ranks}, {kind} communication)"

    def save(self, path: str | Path) -> None:
        """Write `to_csv` to a file. Raise InputError if it cannot be written."""
        try:
            file_path("path", path).write_text(self.to_csv(), encoding="utf-8")
        except OSError as error:
            raise InputError("the pipeline cannot be written", where=str(path), why=cause_of(error)) from None


def order_of_schedule(
    schedule: Schedule, name: str = "", source: str = "pipecompile", weights: tuple[float, ...] = ()
) -> PipelineOrder:
    """Return the order of a schedule's computations. `weights[s]` is the relative time of a forward of stage s. Raise ScheduleError for
    a schedule of slices.
    """
    check_whole(schedule, "cells of other frameworks are of whole micro-batches")
    check_one_direction(schedule, "other frameworks run a stage on one rank")
    rows = (tuple(map(_cell_of, grouped(row, schedule.overlaps))) for row in schedule.rows)
    return PipelineOrder(tuple(rows), name or schedule.name, source, weights)


def _cell_of(actions: Sequence[Action]) -> OrderCell:
    """Return the cell of an action, or of a pair that overlaps."""
    cells = tuple(OrderCell(a.stage, a.kind.value, None if a.kind in SHARDING else a.microbatch) for a in actions)
    return cells[0] if len(cells) == 1 else OrderCell(-1, "OVERLAP_F_B", None, cells)


def as_order(order: object) -> PipelineOrder:
    """Return an order as it is, and a schedule as an order. Raise InputError for anything else, ScheduleError for a schedule of slices."""
    if isinstance(order, Schedule):
        return order_of_schedule(order)
    if isinstance(order, PipelineOrder):
        return order
    raise InputError(
        f"{type_text(order)} is neither a PipelineOrder nor a Schedule", hint='pc.read_schedule("schedule.csv")'
    )
