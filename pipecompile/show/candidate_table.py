"""The table of what was compared to choose micro-batches, schedule and recomputation: a row per candidate."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from pipecompile.ir.candidates import Candidate, Considered
from pipecompile.show.units import BYTES, SECONDS, Unit, fit

__all__ = ["considered_table"]


def considered_table(considered: Considered) -> Table:
    """By number of micro-batches and length of the step; the one that was chosen is marked."""
    rows = considered.rows
    fitting = sum(not row.left_out for row in rows)
    table = Table(
        title=Text(f"{len(rows)} candidates, {fitting} fit"), title_justify="left", title_style="bold",
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False,
    )  # fmt: skip
    slowest, step = (_unit(values) for values in ([r.bottleneck for r in rows], [r.seconds for r in rows]))
    peaks = [max(row.memory, default=0.0) for row in rows]
    held = fit(BYTES, peaks)
    for header in ("micro-\nbatches", f"bottleneck\n{slowest.name}", f"step\n{step.name}", f"peak\n{held.name}"):
        table.add_column(header, justify="right", no_wrap=True)
    for header in ("schedule", "recomputed\nstages", ""):
        table.add_column(header, no_wrap=header == "schedule", overflow="fold")
    for place, (row, peak) in enumerate(zip(rows, peaks, strict=True)):
        chosen = place == considered.chosen
        table.add_row(
            str(row.n_microbatches),
            _number(row.bottleneck, slowest, [r.bottleneck for r in rows]),
            _number(row.seconds, step, [r.seconds for r in rows]),
            held.format(peak, max(peaks)) if row.memory else "",
            Text(row.schedule),
            _stages(row),
            Text("chosen" if chosen else f"left out: {row.left_out}" if row.left_out else ""),
            style="bold" if chosen else "dim" if row.left_out else "",
        )
    return table


def _unit(values: Sequence[float | None]) -> Unit:
    return fit(SECONDS, [value for value in values if value is not None])


def _number(value: float | None, unit: Unit, among: Sequence[float | None]) -> str:
    return "" if value is None else unit.format(value, max(other for other in among if other is not None))


def _stages(row: Candidate) -> str:
    if row.recompute and all(row.recompute):
        return "all"
    return ", ".join(str(stage) for stage, redone in enumerate(row.recompute) if redone)
