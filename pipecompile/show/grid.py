"""A schedule as text: a row per device, a cell per tick.

           0   1   2   3   4   5   6   7   8
    dev 0  0F0 0F1 .   .   0B0---- 0B1---- .
    dev 1  .   1F0 1F1 1B0---- 1B1---- .   .

Dashes continue a cell that lasts longer than a tick. Columns beyond the width continue in a block below.
"""

from __future__ import annotations

from pipecompile.errors import InputError
from pipecompile.ir.timeline import Span, Timeline

__all__ = ["timeline_grid"]

_MOST_TICKS = 100_000
"""Largest number of ticks of a grid."""


def timeline_grid(timeline: Timeline, *, tick: float = 1.0, width: int | None = 100) -> str:
    """Return the compute spans, rounded to whole ticks. Meant for unit-time simulations: spans shorter than a tick
    vanish.

    `tick` is the time of one column, in the unit of the timeline. `width` is the number of characters per line; None
    puts all ticks into one block. Raise InputError if there are too many ticks.
    """
    if tick <= 0 or timeline.makespan / tick > _MOST_TICKS:
        raise InputError(
            f"a tick of {tick:g} cannot show a timeline of {timeline.makespan:g}",
            hint=f"pass tick={timeline.makespan / 100:.3g} or more",
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
    """Return per tick the name that starts there, "-" where a span continues, "." where the device is idle."""
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
        drawn = "".join(_padded(padded, tick, stop, column) for tick in range(start, stop))
        lines.append(f"{f'dev {device}':<{margin}}{drawn}".rstrip())
    return "\n".join(lines) + "\n"


def _padded(cells: list[str], tick: int, stop: int, column: int) -> str:
    """Return one cell, padded with dashes up to the next column if it continues there."""
    continues = tick + 1 < stop and cells[tick + 1] == "-"
    is_bar = cells[tick] != "."
    text = "-" * (column - 1) if cells[tick] == "-" else cells[tick]
    return text.ljust(column - 1, "-" if is_bar and (continues or cells[tick] == "-") else " ") + (
        "-" if continues else " "
    )
