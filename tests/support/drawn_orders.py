"""Orders of pipelines by a seed: any schedule of the catalogue, with communication, sharding and idle ticks or without."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from pipecompile.interchange import OrderCell, PipelineOrder
from pipecompile.interchange.pipeline_order import EMPTY, order_of_schedule
from pipecompile.interchange.reordering import with_messages
from pipecompile.schedules import CATALOGUE, build_schedule, compared_names

__all__ = ["drawn_layout", "drawn_order", "with_moved_messages", "without_waits"]


def drawn_order(random: Random, *, communicates: bool | None = None, plain: bool = False) -> PipelineOrder:
    """A schedule of the catalogue as an order. `plain`: without sharding, overlaps and idle ticks."""
    name = random.choice([*compared_names(), "forward"])
    chunks = CATALOGUE[name].chunks or random.randint(1, 3)
    n_ranks = random.randint(1, 4)
    schedule = build_schedule(name, n_ranks * chunks, random.randint(1, 6), n_devices=n_ranks)
    order = order_of_schedule(schedule, "drawn")
    if random.random() < 0.5 if communicates is None else communicates:
        order = with_messages(order)
    if plain:
        return order
    order = replace(order, rows=tuple(_overlapped(random, row) for row in order.rows))
    if random.random() < 0.5:
        order = replace(order, rows=tuple(map(_sharded, order.rows)))
    return replace(order, rows=tuple(_with_ticks(random, row) for row in order.rows))


def _overlapped(random: Random, row: tuple[OrderCell, ...]) -> tuple[OrderCell, ...]:
    cells: list[OrderCell] = []
    for cell in row:
        before = cells[-1] if cells else EMPTY
        parts = (before, cell)
        alone = all(part.actions and not part.parts for part in parts)
        if alone and before.op == "F" and cell.op == "B" and before.stage != cell.stage and random.random() < 0.1:
            cells[-1] = OrderCell(-1, "OVERLAP_F_B", None, parts)
        else:
            cells.append(cell)
    return tuple(cells)


def _sharded(row: tuple[OrderCell, ...]) -> tuple[OrderCell, ...]:
    stages = sorted({action.stage for cell in row for action in cell.actions})
    ends = ("REDUCE_GRAD", "WAIT_REDUCE_GRAD", "RESHARD")
    after = [OrderCell(stage, op) for stage in stages for op in ends]
    return (*(OrderCell(stage, "UNSHARD") for stage in stages), *row, *after)


def _with_ticks(random: Random, row: tuple[OrderCell, ...]) -> tuple[OrderCell, ...]:
    return tuple(each for cell in row for each in ((EMPTY, cell) if random.random() < 0.1 else (cell,)))


def without_waits(order: PipelineOrder) -> PipelineOrder:
    rows = (tuple(cell for cell in row if not cell.op.startswith("WAIT_SEND")) for row in order.rows)
    return replace(order, rows=tuple(rows))


def with_moved_messages(random: Random, order: PipelineOrder) -> PipelineOrder:
    """Some sends later and some receives earlier in their rows, which keeps every value in time."""
    rows = []
    for row in without_waits(order).rows:
        cells = list(row)
        for _ in range(random.randint(0, 3)):
            index = random.randrange(len(cells)) if cells else 0
            if cells and cells[index].is_transfer:
                steps = random.randint(1, 4)
                place = min(len(cells) - 1, index + steps) if cells[index].is_send else max(0, index - steps)
                cells.insert(place, cells.pop(index))
        rows.append(tuple(cells))
    return replace(order, rows=tuple(rows))


def drawn_layout(random: Random) -> str:
    """A layout of Megatron-LM, with repeated layers and groups, an even number of stages."""
    body = "".join(
        random.choice(["t", "tt", "t*3", "(t|)*2t", "(tt|)*3", "m", ",", "|"]) for _ in range(random.randint(1, 6))
    )
    return f"E{body}t|L"
