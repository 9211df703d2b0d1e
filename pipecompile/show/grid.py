"""A schedule as text: a row per device, a cell per tick.

           0   1   2   3   4   5   6   7   8
    dev 0  0F0 0F1 .   .   0B0---- 0B1---- .
    dev 1  .   1F0 1F1 1B0---- 1B1---- .   .

A cell that lasts longer than a tick is drawn out with dashes. What does not fit into the width continues in a block
below.
"""

from __future__ import annotations

from pipecompile.errors import InputError
from pipecompile.ir.timeline import Span, Timeline

__all__ = ["timeline_grid"]

_MOST_TICKS = 100_000


def timeline_grid(timeline: Timeline, *, tick: float = 1.0, width: int | None = 100) -> str:
    """Draw the compute spans, rounded to whole ticks. Meant for unit-time simulations: what is shorter vanishes.

    `width` None means one block however wide. Raises InputError for a tick so short that nobody could read the grid.
    """
    if tick <= 0 or timeline.makespan / tick > _MOST_TICKS:
        raise InputError(
            f"a tick of {tick:g} cannot show a timeline of {timeline.makespan:g}", hint="use a longer tick"
        )
    origin = min((span.start for span in timeline.spans), default=0.0)
    rows = [_cells(timeline.compute(device), origin, tick) for device in range(timeline.n_devices)]
    ticks = max(map(len, rows), default=0)
    column = max([len(str(ticks)), *(len(cell) for row in rows for cell in row)]) + 1
    margin = len(f"dev {timeline.n_devices - 1}") + 2
    step = ticks if width is None else max(1, (width - margin) // column)
    blocks = [_block(rows, start, min(start + step, ticks), column, margin) for start in range(0, ticks, max(step, 1))]
    return "\n".join(blocks)


def _cells(spans: list[Span], origin: float, tick: float) -> list[str]:
    """Per tick the name that starts there, "-" where it goes on, "." where the device idles."""
    cells: list[str] = []
    for span in spans:
        start, end = round((span.start - origin) / tick), round((span.end - origin) / tick)
        cells += ["."] * (start - len(cells))
        cells += [span.name, *["-"] * (end - start - 1)] if end > start else []
    return cells


def _block(rows: list[list[str]], start: int, stop: int, column: int, margin: int) -> str:
    ruler = " " * margin + "".join(f"{tick:<{column}}" for tick in range(start, stop))
    lines = [ruler.rstrip()]
    for device, row in enumerate(rows):
        padded = row + ["."] * (stop - len(row))
        drawn = "".join(_drawn(padded, tick, stop, column) for tick in range(start, stop))
        lines.append(f"{f'dev {device}':<{margin}}{drawn}".rstrip())
    return "\n".join(lines) + "\n"


def _drawn(cells: list[str], tick: int, stop: int, column: int) -> str:
    """One cell, padded with dashes up to the next column when it goes on there."""
    goes_on = tick + 1 < stop and cells[tick + 1] == "-"
    is_bar = cells[tick] != "."
    text = "-" * (column - 1) if cells[tick] == "-" else cells[tick]
    return text.ljust(column - 1, "-" if is_bar and (goes_on or cells[tick] == "-") else " ") + (
        "-" if goes_on else " "
    )
