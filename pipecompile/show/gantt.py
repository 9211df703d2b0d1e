"""Gantt charts of timelines as SVG: a row per device, copies as thin bars, memory curves below.

matplotlib is imported when a chart is drawn and used through its object interface: no backend is chosen, no global
state changes, and equal timelines give equal bytes.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipecompile.ir import NO_MICROBATCH
from pipecompile.ir.timeline import COMPUTE, Span, Timeline
from pipecompile.ir.views import register_writer
from pipecompile.show.colours import COPY, FAINT, INK, SHADES
from pipecompile.text.units import BYTES, SECONDS, Unit, fit, written

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["timeline_figure", "timeline_svg"]

_STYLE = {
    "svg.hashsalt": "pipecompile", "svg.fonttype": "none", "text.parse_math": False, "font.family": "sans-serif", "font.size": 8.0,
    "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.edgecolor": FAINT,
}  # fmt: skip
_LEFT, _RIGHT, _HEAD, _FOOT = 1.05, 1.35, 0.35, 0.5
_ROW, _MEMORY, _CELL, _NARROW, _WIDE = 0.42, 1.25, 0.25, 10.6, 22.0
"""Inches: margins; heights of a device's row and of a memory panel; width of a cell; least and largest panel width."""
_SMALLEST = 3.2
"""Points: least size of a label; smaller labels are omitted."""


@dataclass(frozen=True, slots=True)
class _Panel:
    """A Gantt panel or a memory panel of one timeline. Its time axis begins at `origin`, is in `unit`, and is labelled if `has_axis`."""

    label: str
    timeline: Timeline
    unit: Unit
    origin: float
    length: float
    gap: float
    """Distance to the panel above, or to the title, in inches."""
    is_memory: bool
    has_axis: bool

    @property
    def height(self) -> float:
        return _MEMORY if self.is_memory else _ROW * self.timeline.n_devices

    def at(self, moment: float) -> float:
        return (moment - self.origin) / self.unit.size


def timeline_svg(
    predicted: Timeline,
    measured: Timeline | None = None,
    *,
    title: str = "",
    devices: Sequence[str] = (),
    seconds: bool = True,
) -> str:
    """Return the chart as SVG text, the measured timeline below the predicted one.

    Each fills the width, with a time axis of its own. `seconds` False: times are in the unit of the costs, as in a unit-time
    simulation. Needs matplotlib.
    """
    from matplotlib import style

    with style.context(["default", _STYLE]):
        figure = timeline_figure(predicted, measured, title=title, devices=devices, seconds=seconds)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def timeline_figure(
    predicted: Timeline,
    measured: Timeline | None = None,
    *,
    title: str = "",
    devices: Sequence[str] = (),
    seconds: bool = True,
) -> Figure:
    """Return the chart as a matplotlib figure in the current style."""
    from matplotlib.figure import Figure

    panels = _panels(predicted, measured, seconds=seconds)
    inner = min(max(_NARROW, _CELL * max(map(_longest_row, (p.timeline for p in panels)))), _WIDE)
    width, height = _LEFT + inner + _RIGHT, _HEAD + _FOOT + sum(p.gap + p.height for p in panels)
    figure = Figure(figsize=(width, height), facecolor="white")
    names = [f"{d} · {devices[d]}" if d < len(devices) else f"device {d}" for d in range(predicted.n_devices)]
    highest = max(max(p.timeline.peak_memory, default=0.0) for p in panels)
    bottom = height - _HEAD
    for panel in panels:
        bottom -= panel.gap + panel.height
        axes = figure.add_axes((_LEFT / width, bottom / height, inner / width, panel.height / height))
        axes.set_xlim(0, panel.length * 1.002)
        _frame(axes, has_axis=panel.has_axis, unit=panel.unit)
        if panel.is_memory:
            _draw_memory(axes, panel, highest)
        else:
            _draw_rows(axes, panel, names, points=inner * 72 / panel.length)
    _head(figure, title, [p.timeline for p in panels])
    return figure


def _panels(predicted: Timeline, measured: Timeline | None, *, seconds: bool) -> list[_Panel]:
    timelines = [("predicted", predicted), *([("measured", measured)] if measured else [])]
    panels: list[_Panel] = []
    for label, timeline in timelines:
        unit = fit(SECONDS, [timeline.makespan]) if seconds else Unit("", 1.0)
        length = (_end(timeline) - _origin(timeline)) / unit.size or 1.0
        kinds = [(False, False), (True, True)] if any(timeline.peak_memory) else [(False, True)]
        gap = 0.46 + (_FOOT if panels and panels[-1].has_axis else 0.0)
        panels += [_Panel(label, timeline, unit, _origin(timeline), length, 0.24 if m else gap, m, a) for m, a in kinds]
    return panels


def _origin(timeline: Timeline) -> float:
    return min((s.start for s in timeline.spans), default=0.0)


def _longest_row(timeline: Timeline) -> int:
    return max((len(timeline.compute(device)) for device in range(timeline.n_devices)), default=0)


def _end(timeline: Timeline) -> float:
    return max((s.end for s in timeline.spans), default=0.0)


def _frame(axes: Axes, *, has_axis: bool, unit: Unit) -> None:
    """Draw thin lines, and label the time axis of a panel that has one."""
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=2, width=0.6, labelbottom=has_axis)
    axes.set_axisbelow(True)
    if has_axis:
        axes.set_xlabel(f"time, {unit.name}" if unit.name else "time, in units of the costs", fontsize=8)


def _draw_rows(axes: Axes, panel: _Panel, names: Sequence[str], points: float) -> None:
    """Draw the rows of a Gantt panel. `points` is the width of one time unit in points."""
    timeline = panel.timeline
    axes.set_ylim(timeline.n_devices, 0)
    axes.set_yticks([d + 0.5 for d in range(timeline.n_devices)], names[: timeline.n_devices])
    axes.tick_params(axis="y", length=0)
    axes.hlines(range(1, timeline.n_devices), 0, 1, transform=axes.get_yaxis_transform(), colors=FAINT, linewidths=0.5)
    makespan = written(SECONDS, timeline.makespan) if panel.unit.name else panel.unit.format(timeline.makespan)
    axes.set_title(f"{panel.label}: makespan {makespan}, bubble {timeline.bubble:.1%}", loc="left", fontsize=8.5, pad=5)
    for device in range(timeline.n_devices):
        copies = sorted({s.track for s in timeline.spans if s.device == device and s.track != COMPUTE})
        _draw_compute(axes, panel, device, 0.62 if copies else 0.8, points)
        for index, track in enumerate(copies):
            spans = [s for s in timeline.spans if s.device == device and s.track == track]
            thickness = min(0.1, 0.22 / len(copies))
            axes.broken_barh(
                _bars(panel, spans), (device + 0.74 + index * thickness, thickness * 0.75), facecolors=COPY
            )


def _draw_compute(axes: Axes, panel: _Panel, device: int, height: float, points: float) -> None:
    """Draw the cells of one device, each with its micro-batch number where the number fits."""
    spans = panel.timeline.compute(device)
    cells = [span.action for span in spans]
    stages = sorted({cell.stage for cell in cells if cell})
    depth = [min(stages.index(cell.stage), 3) if cell else 0 for cell in cells]
    colours = [SHADES[cell.kind][shade] if cell else FAINT for cell, shade in zip(cells, depth, strict=True)]
    bars = _bars(panel, spans)
    line = min((0.05 * width * points for _, width in bars), default=0.0)
    axes.broken_barh(
        bars, (device + 0.1, height), facecolors=colours, edgecolors="white", linewidth=min(0.6, max(line, 0.1))
    )
    for cell, shade, (left, width) in zip(cells, depth, bars, strict=True):
        size = min(8.0, width * points / (0.72 * len(cell.part) + 0.1)) if cell else 0.0
        if cell and cell.microbatch == NO_MICROBATCH:
            continue
        if cell and size >= _SMALLEST:
            axes.text(left + width / 2, device + 0.1 + height / 2, cell.part, fontsize=round(size, 1),
                      ha="center", va="center_baseline", color="white" if shade > 1 else INK)  # fmt: skip


def _bars(panel: _Panel, spans: Sequence[Span]) -> list[tuple[float, float]]:
    return [(panel.at(s.start), (s.end - s.start) / panel.unit.size) for s in spans]


def _draw_memory(axes: Axes, panel: _Panel, top: float) -> None:
    """Draw one step curve per device on one axis, with the peaks in the legend."""
    from matplotlib import colormaps

    unit = fit(BYTES, [top])
    count = max(panel.timeline.n_devices - 1, 1)
    for device, curve in enumerate(panel.timeline.memory):
        moments = [panel.at(moment) for moment, _ in curve] + [panel.at(_end(panel.timeline))]
        sizes = [size / unit.size for _, size in curve] + [curve[-1][1] / unit.size if curve else 0.0]
        peak = f"{device}: peak {unit.format(panel.timeline.peak_memory[device])} {unit.name}"
        axes.plot(
            moments,
            sizes,
            drawstyle="steps-post",
            linewidth=1.1,
            color=colormaps["viridis"](0.85 * device / count),
            label=peak,
        )
    axes.set_ylim(0, top / unit.size * 1.06)
    axes.grid(axis="y", color=FAINT, linewidth=0.5)
    axes.set_ylabel(f"memory, {unit.name}", fontsize=8)
    axes.legend(
        title="device", title_fontsize=7, alignment="left", loc="center left", bbox_to_anchor=(1.003, 0.5), fontsize=7,
        frameon=False, handlelength=1.2, labelspacing=0.25,
    )  # fmt: skip


def _head(figure: Figure, title: str, timelines: Sequence[Timeline]) -> None:
    """Draw the title, and on the same line a legend of the colours in use."""
    from matplotlib.patches import Patch

    spans = [span for timeline in timelines for span in timeline.spans]
    kinds = {cell.kind for span in spans if (cell := span.action)}
    patches = [
        Patch(color=shades[0], label=kind.name.lower().replace("_", " "))
        for kind, shades in SHADES.items()
        if kind in kinds
    ]
    if any(span.track != COMPUTE for span in spans):
        patches.append(Patch(color=COPY, label="copy"))
    width, height = figure.get_size_inches()
    figure.text(0.15 / width, 1 - 0.22 / height, title, fontsize=11, fontweight="bold", va="center")
    figure.text(0.15 / width, 0.12 / height, _key(timelines), fontsize=7, va="center")
    figure.legend(
        handles=patches, loc="center right", bbox_to_anchor=(1 - _RIGHT / width, 1 - 0.22 / height), ncols=5,
        frameon=False, fontsize=8, handlelength=1.0, handleheight=0.9, columnspacing=1.2, borderpad=0,
    )  # fmt: skip


def _key(timelines: Sequence[Timeline]) -> str:
    """Return what numbers and shades stand for."""
    cells = [(s.device, cell) for timeline in timelines for s in timeline.spans if (cell := s.action)]
    if not cells:
        return ""
    stages = {(device, cell.stage) for device, cell in cells}
    is_sliced = any("." in cell.part for _, cell in cells)
    numbers = "number: micro-batch.slice" if is_sliced else "number: micro-batch"
    return numbers if len(stages) == len({d for d, _ in stages}) else f"{numbers} · darker: later stage of the device"


register_writer("figure", timeline_figure)
