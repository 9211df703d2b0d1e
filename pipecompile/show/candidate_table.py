"""The table of candidates for a terminal: a row per candidate, the chosen one in bold."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from pipecompile.ir.candidates import Considered, candidate_columns, caption

__all__ = ["considered_table"]

_TEXT = ("schedule", "recomputed\nstages", "")
"""Headers of the columns that are aligned to the left."""


def considered_table(considered: Considered) -> Table:
    """Return the table of `considered`. Candidates that are left out are dimmed."""
    columns = candidate_columns(considered)
    table = Table(
        title=Text(caption(considered)), title_justify="left", title_style="bold",
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False,
    )  # fmt: skip
    for header in columns:
        is_wrapped = header in _TEXT[1:]
        table.add_column(
            header, justify="left" if header in _TEXT else "right", no_wrap=not is_wrapped, overflow="fold"
        )
    for index, (row, cells) in enumerate(zip(considered.rows, zip(*columns.values(), strict=True), strict=True)):
        style = "bold" if index == considered.chosen else "dim" if row.left_out else ""
        table.add_row(*map(Text, cells), style=style)
    return table
