"""The candidates of the joint choice of micro-batches, schedule and recomputation, and their table as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from textwrap import wrap

from pipecompile.text.units import BYTES, SECONDS, Unit, fit

__all__ = ["Candidate", "Considered", "candidate_columns", "caption"]

WIDTH = 120
"""Characters of a line of the printed table; a longer reason for leaving a candidate out is wrapped."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One combination of `n_microbatches`, `schedule` and `recompute` (a flag per stage).

    `bottleneck` is the time of the slowest stage for one micro-batch, in seconds. `seconds` is the simulated time of a
    step. `memory` is the peak of each device, in bytes. Each is None or empty if unknown. `left_out` is the reason why
    the candidate cannot be chosen, empty if there is none. `schedule` is empty if no schedule exists for so many
    micro-batches.
    """

    n_microbatches: int
    schedule: str = ""
    recompute: tuple[bool, ...] = ()
    bottleneck: float | None = None
    seconds: float | None = None
    memory: tuple[float, ...] = ()
    left_out: str = ""


@dataclass(frozen=True, slots=True)
class Considered:
    """All candidates, by number of micro-batches, and the index of the chosen one. `str` is a table."""

    rows: tuple[Candidate, ...]
    chosen: int

    @property
    def best(self) -> Candidate:
        """Return the chosen candidate: of those that fit, none has a shorter step."""
        return self.rows[self.chosen]

    def __repr__(self) -> str:
        return f"Considered(n_candidates={len(self.rows)}, chosen={self.best})"

    def __str__(self) -> str:
        columns = candidate_columns(self)
        headers = [name.split("\n") for name in columns]
        lines = [[header[0] for header in headers], [header[1] if len(header) > 1 else "" for header in headers]]
        cells = [*lines, *(list(row) for row in zip(*columns.values(), strict=True))]
        widths = [max(len(row[column]) for row in cells) for column in range(len(headers) - 1)]
        body = [line for row in cells for line in _lines(row, widths)]
        rule = "─" * max(map(len, body))
        return "\n".join([caption(self), *body[:2], rule, *body[2:]])


def caption(considered: Considered) -> str:
    """Return the heading of the table: the numbers of candidates and of those that fit."""
    count, fitting = len(considered.rows), sum(not row.left_out for row in considered.rows)
    return f"{count} candidate{'s' * (count != 1)}, {fitting} fit{'s' * (fitting == 1)}"


def candidate_columns(considered: Considered) -> dict[str, list[str]]:
    """Return header -> cells, in the order of `considered.rows`. A header has up to two lines, a column has one unit."""
    rows = considered.rows
    bottlenecks, steps = [row.bottleneck for row in rows], [row.seconds for row in rows]
    peaks = [max(row.memory) if row.memory else None for row in rows]
    (slowest, step), held = (_unit(SECONDS, values) for values in (bottlenecks, steps)), _unit(BYTES, peaks)
    remarks = [f"left out: {row.left_out}" if row.left_out else "" for row in rows]
    remarks[considered.chosen] = "chosen"
    return {
        "micro-\nbatches": [str(row.n_microbatches) for row in rows],
        f"bottleneck\n{slowest.name}": _numbers(bottlenecks, slowest),
        f"step\n{step.name}": _numbers(steps, step),
        f"peak\n{held.name}": _numbers(peaks, held),
        "schedule": [row.schedule for row in rows],
        "recomputed\nstages": [_stages(row.recompute) for row in rows],
        "": remarks,
    }


def _unit(scale: tuple[Unit, ...], values: Sequence[float | None]) -> Unit:
    return fit(scale, [value for value in values if value is not None])


def _numbers(values: Sequence[float | None], unit: Unit) -> list[str]:
    largest = max((value for value in values if value is not None), default=0.0)
    return ["" if value is None else unit.format(value, largest) for value in values]


def _stages(recompute: Sequence[bool]) -> str:
    if recompute and all(recompute):
        return "all"
    return ", ".join(str(stage) for stage, is_recomputed in enumerate(recompute) if is_recomputed)


def _lines(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Return the lines of one row: four columns of numbers to the right, others to the left, the last one wrapped."""
    *cells, remark = row
    aligned = [
        cell.rjust(width) if column < 4 else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    first = "  ".join(aligned) + "  "
    parts = wrap(remark, max(WIDTH - len(first), 20)) or [""]
    return [(start.ljust(len(first)) + part).rstrip() for start, part in zip_longest([first], parts, fillvalue="")]
