"""Tables for a terminal: that of `print(pipe)`, with a row per stage, totals and the quality of the cut; and that of candidates."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from shutil import get_terminal_size
from textwrap import wrap
from typing import Literal

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from pipecompile.ir.candidates import Considered, candidate_columns, caption
from pipecompile.ir.plan import Plan, StageSummary, StepSummary
from pipecompile.ir.timeline import Timeline
from pipecompile.text.units import BYTES, COUNT, FLOPS, SECONDS, counted, fit, written

__all__ = ["StageTable", "considered_table", "remarks", "render", "stage_caption", "stage_columns", "step_gap"]

_MODULES = 16, 12, 32
"""Characters of the column of modules: with two spaces between columns at least, on any console at least, and the longest pair on one line."""


@dataclass(frozen=True, slots=True)
class StageTable:
    """A row per stage and a footer with totals, for a console of any width; the caption has the bottleneck and its gap to the lower bound.

    `predicted` is the predicted timeline, None without a simulation. Its bubble is in the caption, and the gap of a searched schedule.
    """

    plan: Plan
    predicted: Timeline | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield Text(_title(self.plan), style="bold")
        yield self._rows(options.max_width)
        yield stage_caption(self.plan, self.predicted)

    def _rows(self, width: int) -> Table:
        """Return the table. On a narrow console columns are nearer to each other, and names of modules take more lines."""
        stages = self.plan.stages
        columns = stage_columns(stages)
        forced = columns.pop("forced", ([""] * len(stages), ""))[0]
        others = [_widest(header, cells) for header, cells in columns.items() if header != "modules"]
        spaces = next((n for n in (2, 1) if width - sum(others) - n * len(others) >= _MODULES[0] + n), 1)
        room = max(width - sum(others) - spaces * len(others) - 2, _MODULES[1])
        columns["modules"] = [_in_lines(*each, room) for each in zip(columns["modules"][0], forced, strict=True)], ""
        table = Table(box=box.SIMPLE_HEAD, padding=(0, spaces - 1, 0, 0), pad_edge=False, show_footer=True)
        for header, (cells, total) in columns.items():
            justify: Literal["left", "right"] = "left" if header in ("device", "modules") else "right"
            table.add_column(header, total, justify=justify, no_wrap=True, min_width=_widest(header, (cells, total)))
        slowest = max(range(len(stages)), key=lambda i: _seconds(stages[i]), default=-1)
        for row in range(len(stages)):
            table.add_row(*(Text(cells[row]) for cells, _ in columns.values()), style="bold" if row == slowest else "")
        return table


def render(table: RenderableType, width: int | None = None) -> str:
    """Return the table as plain text without control codes or trailing spaces, for `width` characters.

    Without `width` it is that of the terminal if stdout is one, and at most 100. A table that needs more is wider.
    """
    if width is None:
        width = min(100, get_terminal_size().columns) if sys.stdout.isatty() else 100
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as capture:
        console.print(table, crop=False)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()).strip("\n")


def stage_columns(stages: Sequence[StageSummary]) -> dict[str, tuple[list[str], str]]:
    """Return header -> cells and total. A column has one unit, that of its largest value."""
    columns = {
        "stage": ([str(s.stage) for s in stages], ""),
        "device": ([s.device for s in stages], ""),
        "modules": ([_modules(s) for s in stages], ""),
        "nodes": ([str(s.nodes) for s in stages], str(sum(s.nodes for s in stages))),
    }
    measured = (
        ("params", COUNT, [float(s.parameters) for s in stages]),
        ("FLOPs", FLOPS, [s.flops for s in stages]),
        ("fwd", SECONDS, [s.forward for s in stages]),
        ("bwd", SECONDS, [s.backward for s in stages]),
        ("saved", BYTES, [s.saved_bytes for s in stages]),
        ("sent", BYTES, [s.sent_bytes for s in stages]),
        ("held", BYTES, [s.memory for s in stages]),
    )
    for header, scale, values in measured:
        if header in ("FLOPs", "held") and not any(values):
            continue
        unit, largest = fit(scale, values), max(values)
        cells = [unit.format(value, largest) for value in values]
        columns[f"{header}\n{unit.name}".strip()] = cells, unit.format(sum(values), largest)
    columns["skips\nin/out"] = ([f"{s.skips_in}/{s.skips_out}" for s in stages], "")
    if any(s.forced for s in stages):
        columns["forced"] = ([", ".join(s.forced) for s in stages], "")
    return columns


def _modules(stage: StageSummary) -> str:
    first, last = stage.first or "(root)", stage.last or "(root)"
    if first == last:
        return first
    return f"{first} … {last}" if len(first + last) < _MODULES[2] else f"{first}\n…{last}"


def _in_lines(modules: str, forced: str, width: int) -> str:
    """Return the modules of a stage in lines of `width` characters, and below them the constraints."""
    pair = modules if len(modules) <= width else modules.replace(" … ", "\n…")
    lines = [line for name in pair.splitlines() for line in _broken(name, width)]
    return "\n".join([*lines, *wrap(f"forced: {forced}" * bool(forced), width)])


def _broken(name: str, width: int) -> list[str]:
    """Return a dotted name in lines of `width` characters: broken behind dots, in a part that is longer behind underscores."""
    lines = [""]
    for part in re.findall(r"[^.]+\.?", name):
        for word in [part] if len(part) <= width else re.findall(r"_*[^_]+_?", part):
            if lines[-1] and len(lines[-1] + word) > width:
                lines.append("")
            lines[-1] += word
    return lines


def _widest(header: str, column: tuple[list[str], str]) -> int:
    """Return the characters of the longest line of a column."""
    return max(len(line) for text in (header, *column[0], column[1]) for line in (text.splitlines() or [""]))


def _seconds(stage: StageSummary) -> float:
    return stage.forward + stage.backward


def _title(plan: Plan) -> str:
    devices = len(set(plan.placement))
    size = "" if plan.samples is None else f" of {counted(plan.samples, 'sample')}"
    return (f"{plan.n_stages} stage{'s' * (plan.n_stages != 1)} on {devices} device{'s' * (devices != 1)}, "
                f"cut by {plan.method}, {plan.cost} costs, per micro-batch{size}")  # fmt: skip


def stage_caption(plan: Plan, predicted: Timeline | None) -> Text:
    """Return the figures of the cut on one line, and the remarks below."""
    parts = [
        f"bottleneck {written(SECONDS, plan.bottleneck)}, {plan.status}",
        f"lower bound {written(SECONDS, plan.lower_bound)}",
        f"gap {plan.gap:.1%}",
        f"balance {_balance(plan.stages):.0%}",
    ]
    parts += [] if predicted is None else [f"bubble {predicted.bubble:.1%}"]
    proven = [] if predicted is None or predicted.bound is None else [step_gap(predicted)]
    return Text("\n".join([" · ".join(parts), *proven, *remarks(plan)]))


def step_gap(predicted: Timeline) -> str:
    """Return the makespan of a timeline, its lower bound and the gap as text; an empty text without a bound."""
    if predicted.bound is None or predicted.gap is None:
        return ""
    step, bound = (written(SECONDS, x) for x in (predicted.makespan, predicted.bound))
    return f"step {step} · no schedule below {bound} · gap {predicted.gap:.1%}"


def _step_of_cuts(step: StepSummary) -> str:
    """Return the step of the cut, the bound over all cuts, and what the choice by the step gained."""
    bound = f"no cut has a step below {written(SECONDS, step.lower_bound)} · gap {step.gap:.1%}"
    if step.compared > 1 and step.seconds < step.first_seconds * (1 - 1e-6):
        gain = step.first_seconds / step.seconds - 1
        bound += f" · shortest of {step.compared} cuts: that with the least bottleneck takes {gain:.1%} longer"
    return f"step {written(SECONDS, step.seconds)} · {bound}"


def remarks(plan: Plan) -> list[str]:
    """Return a line each, where it applies: on recomputed stages, the price of the user's constraints, the column `held`."""
    lines = [] if plan.step is None else [_step_of_cuts(plan.step)]
    if any(plan.recompute):
        stages = [str(s) for s, redone in enumerate(plan.recompute) if redone]
        lines.append(f"forward is recomputed in stage{'s' * (len(stages) > 1)} {', '.join(stages)}")
    if plan.price is not None:
        lines.append(
            f"the constraints make the slowest stage {plan.price:.1%} slower"
            if plan.price >= 5e-4
            else "the constraints cost nothing"
        )
    if any(stage.memory for stage in plan.stages):
        lines.append(
            "held: parameters, gradients, optimizer state, buffers, and activations of the micro-batches in flight, as the cut counts them"
        )
    return lines


def _balance(stages: Sequence[StageSummary]) -> float:
    """Return the mean over the largest compute time: 1 if all stages take equally long."""
    times = [_seconds(s) for s in stages]
    return sum(times) / (len(times) * max(times)) if any(times) else 1.0


_TEXT = ("schedule", "recomputed\nstages", "")
"""Headers of the columns that are aligned to the left."""


def considered_table(considered: Considered) -> Table:
    """Return the table of `considered`: a row per candidate, the chosen one in bold, those that are left out dimmed."""
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
