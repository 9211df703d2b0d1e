"""Repair of an order: the same cells in an order that runs under all rules of communicators.

1. Computations that cannot run in their order are taken as soon as they can, those first that come first in their row.
2. Messages are ordered by the time at which they are sent if nothing is in their way. Each rank posts them in this one order:
   a SEND after its computation, a RECV before the computation that runs on the rank at this time.
3. WAIT_SEND_F comes after the backward of the same stage and micro-batch, which proves the receipt; other waits at the end.

All ranks follow one order of messages, so no queue has two that wait for one another, whatever it spans.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from pipecompile.errors import ScheduleError
from pipecompile.interchange.launch_graph import LaunchStep, computed_before, graph_without_messages, received_by
from pipecompile.interchange.pipeline_order import OrderCell, PipelineOrder, as_order
from pipecompile.ir import Schedule
from pipecompile.verifiers import verify

__all__ = ["repair_order", "with_messages"]

_LEAST = 1e-3
"""Least weight of a stage, so that a computation ends after it begins."""


def repair_order(order: PipelineOrder | Schedule) -> PipelineOrder:
    """Return an order of the same cells that runs under all rules of communicators, with a WAIT_SEND for each send as torch wants it.

    An order without communication that can run is returned as it is. Raise VerifyError if cells are missing, and ScheduleError if
    no order of the computations can run.
    """
    order = as_order(order)
    computed = _computable(order)
    return with_messages(computed) if order.has_communication else computed


def _computable(order: PipelineOrder) -> PipelineOrder:
    """Return the order with computations that can run one after another."""
    graph = graph_without_messages(order)
    if not graph.cycle(graph.times()) and not _is_early(order):
        verify(order.schedule)
        return order
    kept = {"SEND_F", "RECV_F", "SEND_B", "RECV_B", "WAIT_SEND_F", "WAIT_SEND_B", ""}
    for rank, index, cell in order.cells():
        if not cell.actions and cell.op not in kept:
            raise ScheduleError(
                f"{cell} cannot be kept", where=f"rank {rank} (line {rank + 1}), cell {index + 1}",
                why="the computations around it have to change places", hint="a file of computations alone: torch adds the rest",
            )  # fmt: skip
    taken = replace(order, rows=tuple(map(tuple, _greedy(order))))
    verify(taken.schedule)
    return replace(order, rows=_in_place_of(order, taken))


def _is_early(order: PipelineOrder) -> bool:
    """Return whether a computation comes before one of its own rank that it needs."""
    place = {
        (a.stage, a.kind.value, a.microbatch): (rank, index) for rank, index, c in order.cells() for a in c.actions
    }
    for rank, index, cell in order.cells():
        for key in _needed(cell):
            other_rank, other = place.get(key, (-1, 0))
            if other_rank == rank and other > index:
                return True
    return False


Key = tuple[int, str, int]


def _needed(cell: OrderCell) -> list[Key]:
    """Return the computations that those of a cell need, of their own stage and of its neighbours, outside the cell."""
    keys = computed_before(cell)
    for a in cell.actions:
        before = {"B": "FR", "I": "FR", "W": "I", "R": "F"}.get(a.kind.value, "")
        keys += [(a.stage, kind, a.microbatch) for kind in before]
    inside = {(a.stage, a.kind.value, a.microbatch) for a in cell.actions}
    return [key for key in keys if key not in inside]


def _greedy(order: PipelineOrder) -> list[list[OrderCell]]:
    """Return the computations, each rank taking the first of its row that can run. Quadratic in the length of a row at worst."""
    left = [[cell for cell in row if cell.actions] for row in order.rows]
    present = {(a.stage, a.kind.value, a.microbatch) for row in left for cell in row for a in cell.actions}
    done: set[Key] = set()
    rows: list[list[OrderCell]] = [[] for _ in left]
    while any(left):
        before = len(done)
        for rank, row in enumerate(left):
            able = (i for i, cell in enumerate(row) if all(key in done or key not in present for key in _needed(cell)))
            if (index := next(able, None)) is not None:
                rows[rank].append(cell := row.pop(index))
                done |= {(a.stage, a.kind.value, a.microbatch) for a in cell.actions}
        if len(done) == before:
            raise ScheduleError(
                "no order of these cells can run", why="cells of OVERLAP_F_B wait for one another",
                where=", ".join(f"rank {rank}: {row[0]}" for rank, row in enumerate(left) if row), hint="write their parts one by one",
            )  # fmt: skip
    return rows


def _in_place_of(order: PipelineOrder, taken: PipelineOrder) -> tuple[tuple[OrderCell, ...], ...]:
    """Return the rows with computations as in `taken`, and all other cells where they were."""
    rows = []
    for row, cells in zip(order.rows, taken.rows, strict=True):
        following = iter(cells)
        rows.append(tuple(next(following) if cell.actions else cell for cell in row))
    return tuple(rows)


@dataclass(frozen=True, slots=True)
class _Message:
    """A message of the order: when it is sent in seconds, and where. `number` parts those of one time."""

    time: float
    number: int
    send: OrderCell
    source: int
    target: int


def with_messages(order: PipelineOrder) -> PipelineOrder:
    """Return the order with its computations, sharding and idle ticks as they are, and sends, receives and waits anew."""
    weights = order.weights or (1.0,) * order.schedule.n_stages
    timed = replace(order, rows=_without_messages(order), weights=tuple(max(_LEAST, weight) for weight in weights))
    graph = graph_without_messages(timed)
    ends = graph.times()
    if graph.cycle(ends):
        raise ScheduleError("the computations wait for one another", hint="pc.repair_order(order)")
    messages = sorted(_messages(timed, ends), key=lambda each: (each.time, each.number))
    rows = []
    for rank, row in enumerate(timed.rows):
        own = [m for m in messages if rank in (m.source, m.target)]
        finish = [ends[LaunchStep("passed", rank, index)] for index in range(len(row))]
        rows.append(tuple(_with_waits(_merged(rank, row, finish, own))))
    return replace(order, rows=tuple(rows))


def _without_messages(order: PipelineOrder) -> tuple[tuple[OrderCell, ...], ...]:
    return tuple(
        tuple(cell for cell in row if not cell.is_transfer and not cell.op.startswith("WAIT_SEND"))
        for row in order.rows
    )


def _messages(order: PipelineOrder, ends: dict[LaunchStep, float]) -> Iterator[_Message]:
    """Yield the messages that the computations of other ranks read, with the end of the cell that computes their value."""
    made: dict[Key, tuple[int, float]] = {}
    for rank, index, cell in order.cells():
        for a in cell.actions:
            made[a.stage, a.kind.value, a.microbatch] = rank, ends[LaunchStep("passed", rank, index)]
    ranked = sorted(order.cells(), key=lambda each: ends[LaunchStep("passed", *each[:2])])
    for number, (rank, _, cell) in enumerate(ranked):
        for part, need in enumerate(received_by(cell)):
            send = need.partner
            kinds = "F" if send.op == "SEND_F" else "BI"
            for key in ((send.stage, kind, send.microbatch or 0) for kind in kinds):
                source, time = made.get(key, (rank, 0.0))
                if source != rank:
                    yield _Message(time, 2 * number + part, send, source, rank)


def _merged(
    rank: int, row: Sequence[OrderCell], finish: Sequence[float], messages: Sequence[_Message]
) -> Iterator[OrderCell]:
    """Yield the row with each message before the first computation that ends after it is sent, right after the one before."""
    left = deque(messages)
    ends = [end for cell, end in zip(row, finish, strict=True) if cell.actions]
    place = 0
    for cell in row:
        if cell.actions and not place:
            yield from _until(ends[0], left, rank)
        yield cell
        if cell.actions:
            place += 1
            yield from _until(ends[place] if place < len(ends) else inf, left, rank)


def _until(end: float, left: deque[_Message], rank: int) -> Iterator[OrderCell]:
    """Yield the cells of `rank` for the messages that are sent before `end` seconds."""
    while left and left[0].time < end:
        message = left.popleft()
        yield message.send if message.source == rank else message.send.partner


def _with_waits(cells: Iterator[OrderCell]) -> Iterator[OrderCell]:
    """Yield the cells with one wait for each send."""
    pending: dict[OrderCell, OrderCell] = {}
    for cell in cells:
        yield cell
        if cell.is_send:
            pending[cell] = OrderCell(cell.stage, f"WAIT_{cell.op}", cell.microbatch)
        for action in cell.actions:
            if action.kind.value in "BI":
                sent = OrderCell(action.stage, "SEND_F", action.microbatch)
                if sent in pending:
                    yield pending.pop(sent)
    yield from pending.values()
