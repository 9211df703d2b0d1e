"""HTML for notebooks: a heading, a table, and a Gantt chart as SVG with the name of each cell as tooltip.

The chart is plain SVG without matplotlib: it is fast, and a browser shows the tooltips. Importing this module registers
the HTML forms of plans, programs, schedules and timelines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from pipecompile.errors import PipecompileError
from pipecompile.ir import NO_MICROBATCH, Program, Schedule
from pipecompile.ir.plan import Plan
from pipecompile.ir.slices import shape_text
from pipecompile.ir.timeline import COMPUTE, Span, Timeline
from pipecompile.ir.views import register_html
from pipecompile.show.colours import COPY, FAINT, INK, SHADES
from pipecompile.show.table import stage_caption, stage_columns
from pipecompile.text.units import counted

__all__ = ["pipeline_html", "plan_html", "program_html", "schedule_html", "timeline_chart", "timeline_html"]

_WIDTH, _LEFT, _ROW, _CELL = 1000, 64, 24, 18
"""Pixels: width of a chart, of its margin; height of a row, of a cell."""
_MOST_CELLS, _MOST_LINES = 20_000, 2_000
"""Limits of what a notebook can show: cells of a chart, lines of a text. The output says how many are omitted."""
_FONT = "font: 11px system-ui, sans-serif"


def pipeline_html(plan: Plan, timeline: Timeline) -> str:
    """Return the table of stages above the predicted step."""
    return plan_html(plan, timeline) + timeline_html(timeline)


def plan_html(plan: Plan, predicted: Timeline | None = None) -> str:
    """Return the table of stages with its caption."""
    columns = stage_columns(plan.stages)
    head = "".join(f"<th style='white-space: pre-line'>{escape(name)}</th>" for name in columns)
    rows = "".join(_table_row([cells[s] for cells, _ in columns.values()]) for s in range(plan.n_stages))
    foot = _table_row([total for _, total in columns.values()])
    caption = escape(stage_caption(plan, predicted).plain)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody><tfoot>{foot}</tfoot></table><p>{caption}</p>"


def schedule_html(schedule: Schedule) -> str:
    """Return the chart of the schedule in unit time; for an illegal schedule its faults and its CSV."""
    from pipecompile.simulation.simulator import simulate

    heading = f"<b>{escape(schedule.name)}</b>, {shape_text(schedule)}"
    try:
        timeline = simulate(schedule)
    except PipecompileError as error:
        return f"{heading}<pre>{escape(str(error))}</pre><pre>{escape(schedule.to_csv())}</pre>"
    peaks = " ".join(f"{peak:g}" for peak in timeline.peak_in_flight)
    noun = "micro-batches" if schedule.n_slices == 1 else "slices"
    return f"{heading}; {noun} in flight per device: {peaks}{timeline_html(timeline)}"


def program_html(program: Program) -> str:
    """Return the number of instructions, and the folded text."""
    count = sum(map(len, program.rows))
    lines = str(program).splitlines()
    rest = [f"... {len(lines) - _MOST_LINES} lines more"] if len(lines) > _MOST_LINES else []
    text = escape("\n".join([*lines[:_MOST_LINES], *rest]))
    places = f"{counted(program.n_stages, 'stage')} on {counted(len(program.rows), 'device')}"
    summary = f"<b>program</b>, {places}, {counted(count, 'instruction')}"
    return f"<details><summary>{summary}</summary><pre>{text}</pre></details>"


def timeline_html(timeline: Timeline) -> str:
    """Return the figures and the chart of a timeline."""
    count = len(timeline.spans)
    left_out = f", the first {_MOST_CELLS:,} of {count:,} cells" if count > _MOST_CELLS else ""
    figures = f"makespan {timeline.makespan:.6g}, bubble {timeline.bubble:.1%}{left_out}"
    return f"<div>{figures}</div>{timeline_chart(timeline)}"


def timeline_chart(timeline: Timeline) -> str:
    """Return a row per device as SVG, with copies as thin bars at its lower edge."""
    spans = sorted(timeline.spans, key=lambda span: span.start)
    height = _ROW * timeline.n_devices + 4
    scale = (_WIDTH - _LEFT) / (timeline.makespan or 1.0)
    origin = spans[0].start if spans else 0.0
    shapes = "".join(_shapes(timeline, spans[:_MOST_CELLS], origin, scale))
    attributes = (
        f"viewBox='0 0 {_WIDTH} {height}' width='100%' style='max-width: {_WIDTH}px; background: white; {_FONT}'"
    )
    return f"<svg xmlns='http://www.w3.org/2000/svg' {attributes}>{shapes}</svg>"


def _shapes(timeline: Timeline, spans: Sequence[Span], origin: float, scale: float) -> Iterator[str]:
    stages = [sorted({a.stage for s in timeline.compute(d) if (a := s.action)}) for d in range(timeline.n_devices)]
    for device in range(timeline.n_devices):
        top = device * _ROW
        yield f"<text x='0' y='{top + 14}' fill='{INK}'>device {device}</text>"
    for span in spans:
        x, width, top = _LEFT + (span.start - origin) * scale, (span.end - span.start) * scale, span.device * _ROW
        title = f"<title>{escape(span.name)}: {span.start - origin:.6g} to {span.end - origin:.6g}</title>"
        attributes = f"x='{x:.1f}' width='{max(width - 0.6, 0.3):.1f}'"
        if span.track != COMPUTE:
            yield f"<rect {attributes} y='{top + _CELL + 2}' height='3' fill='{COPY}'>{title}</rect>"
            continue
        action = span.action
        colour, label = FAINT, ""
        if action is not None:
            colour = SHADES[action.kind][min(stages[span.device].index(action.stage), 3)]
            label = "" if action.microbatch == NO_MICROBATCH else action.part
        yield f"<rect {attributes} y='{top + 2}' height='{_CELL - 2}' fill='{colour}'>{title}</rect>"
        if label and width > 7 * len(label):
            yield f"<text x='{x + width / 2:.1f}' y='{top + 14}' text-anchor='middle' fill='{INK}' pointer-events='none'>{label}</text>"


def _table_row(cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


register_html(Plan, plan_html)
register_html(Program, program_html)
register_html(Schedule, schedule_html)
register_html(Timeline, timeline_html)
