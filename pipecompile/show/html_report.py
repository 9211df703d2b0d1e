"""An HTML report of one pipeline: table, timelines with memory, the cut, advice, and "what if" simulations.

    report = template (show/page) + data as JSON        no network, no libraries: the page opens anywhere

Times are whole numbers of a tick, a millionth of the step, which halves the size of the text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import msgspec

from pipecompile.errors import ScheduleError
from pipecompile.ir import HOST, NO_SLICE, Action, Schedule
from pipecompile.ir.plan import Plan
from pipecompile.ir.slices import title_of
from pipecompile.ir.timeline import COMPUTE, Span, Timeline
from pipecompile.show.colours import COPY, FILLS, SHADES
from pipecompile.show.memory_table import MemoryFigures, memory_columns, memory_remarks
from pipecompile.show.stage_comparison import comparison_columns, comparison_remarks
from pipecompile.show.table import stage_caption, stage_columns
from pipecompile.text.units import BYTES, SECONDS, written

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from pipecompile.ir.what_if import WhatIf

__all__ = ["ReportSetting", "report_html"]

_SCRIPTS = ("draw.js", "simulate.js", "gantt.js", "cut.js", "what_if.js", "main.js")
_TICKS = 1_000_000
"""Ticks per step."""


@dataclass(frozen=True, slots=True)
class ReportSetting:
    """The setting of a report: its `title`, and the `dispatch` of the measured step. Facts are (name, value): `figures` of the step,
    `environment` of the place where it ran. `again`: lines that make the report again.
    """

    title: str = ""
    dispatch: str = ""
    figures: tuple[tuple[str, str], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    again: str = ""


_NOWHERE = ReportSetting()


def report_html(
    schedule: Schedule,
    predicted: Timeline,
    measured: Timeline | None = None,
    *,
    plan: Plan | None = None,
    graph: GraphModule | None = None,
    advice: Sequence[object] = (),
    what_if: WhatIf | None = None,
    seconds: bool = True,
    memory: MemoryFigures | None = None,
    setting: ReportSetting = _NOWHERE,
) -> str:
    """Return the page as text, without the parts whose argument is None or empty.

    `seconds` False: times are in the unit of the costs.
    """
    timelines = {"predicted": predicted} | ({} if measured is None else {"measured": measured})
    names = plan.devices if plan is not None else ()
    data = {
        "title": " · ".join(filter(None, (setting.title, title_of(schedule)))),
        "seconds": seconds,
        "facts": [*_facts(timelines, plan, seconds=seconds), *setting.figures],
        "palette": {kind.value: shades for kind, shades in SHADES.items()},
        "bands": FILLS,
        "copyColour": COPY,
        "devices": [f"{d} · {names[d]}" if d < len(names) else f"device {d}" for d in range(predicted.n_devices)],
        "table": None if plan is None else _table(plan, predicted),
        "compared": None
        if measured is None or not seconds
        else _compared(predicted, measured, setting.dispatch, names),
        "memory": None if memory is None else _memory(names, memory),
        "timelines": [_timeline(name, timeline) for name, timeline in timelines.items()],
        "advice": [str(line) for line in advice],
        "cut": None if plan is None or graph is None else _cut(graph, plan),
        "environment": {"facts": setting.environment, "again": setting.again} if setting.environment else None,
        "whatIf": None if what_if is None else _what_if(what_if, names),
    }
    text = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    page = _read("page.html").replace("/*STYLE*/", _read("style.css"))
    script = 'const DATA = JSON.parse(document.getElementById("data").textContent);\n' + "\n".join(map(_read, _SCRIPTS))
    return page.replace("/*SCRIPT*/", script).replace("/*DATA*/", text)


def _read(name: str) -> str:
    return (files("pipecompile.show") / "page" / name).read_text(encoding="utf-8")


def _facts(timelines: dict[str, Timeline], plan: Plan | None, *, seconds: bool) -> Iterator[tuple[str, str]]:
    for name, timeline in timelines.items():
        step = written(SECONDS, timeline.makespan) if seconds else f"{timeline.makespan:g}"
        yield f"step, {name}", step
        yield f"bubble, {name}", f"{timeline.bubble:.1%}"
        if timeline.bound is not None and timeline.gap is not None:
            yield "no schedule below", written(SECONDS, timeline.bound) if seconds else f"{timeline.bound:g}"
            yield f"gap, {name}", f"{timeline.gap:.1%}"
        if any(timeline.peak_memory):
            yield f"peak activations, {name}", written(BYTES, max(timeline.peak_memory))
    if plan is not None:
        yield "slowest stage", written(SECONDS, plan.bottleneck)
        yield "no slowest stage below", written(SECONDS, plan.lower_bound)
        yield "bottleneck", f"{plan.status}, gap {plan.gap:.1%}"
        if plan.step is not None:
            yield "step of this cut", written(SECONDS, plan.step.seconds)
            yield "no cut has a step below", f"{written(SECONDS, plan.step.lower_bound)}, gap {plan.step.gap:.1%}"


def _table(plan: Plan, predicted: Timeline) -> dict[str, Any]:
    slowest = max(range(plan.n_stages), key=lambda s: plan.stages[s].forward + plan.stages[s].backward)
    caption = stage_caption(plan, predicted).plain
    return {"columns": _columns(stage_columns(plan.stages)), "slowest": slowest, "caption": caption}


def _compared(predicted: Timeline, measured: Timeline, dispatch: str, devices: Sequence[str]) -> dict[str, Any]:
    remarks = comparison_remarks(predicted, measured, dispatch=dispatch, devices=devices)
    return {"columns": _columns(comparison_columns(predicted, measured)), "remarks": remarks}


def _memory(devices: Sequence[str], memory: MemoryFigures) -> dict[str, Any]:
    return {
        "columns": _columns(memory_columns(devices, memory.kinds, memory.limits)),
        "remarks": memory_remarks(memory.kinds),
    }


def _columns(columns: Mapping[str, tuple[list[str], str]]) -> list[dict[str, Any]]:
    """Return the columns of a table as the page takes them; those of words are aligned on the left."""
    return [
        {"name": name, "text": name in ("device", "modules"), "cells": cells, "total": total}
        for name, (cells, total) in columns.items()
    ]


# -- timelines ------------------------------------------------------------------------------------------------------


def _timeline(name: str, timeline: Timeline) -> dict[str, Any]:
    origin = min((span.start for span in timeline.spans), default=0.0)
    tick = timeline.makespan / _TICKS or 1.0

    def ticks(moment: float) -> int:
        return round((moment - origin) / tick)

    def extent(span: Span) -> tuple[int, int]:
        start = ticks(span.start)
        return start, ticks(span.end) - start

    critical = {(span.device, span.track, span.start) for span in timeline.critical_path}
    rows = [
        [
            (*cell, *extent(span), int((span.device, span.track, span.start) in critical))
            for span in timeline.compute(device)
            if (cell := _cell(span)) is not None
        ]
        for device in range(timeline.n_devices)
    ]
    copies = sorted((s for s in timeline.spans if s.track != COMPUTE), key=lambda span: span.start)
    figures = {"tick": tick, "makespan": timeline.makespan, "bubble": timeline.bubble, "peaks": timeline.peak_memory}
    drawn_copies = [(s.device, s.track.removeprefix("to "), s.name, *extent(s)) for s in copies]
    memory = [[(ticks(moment), size) for moment, size in curve] for curve in timeline.memory]
    return {"name": name, "rows": rows, "copies": drawn_copies, "memory": memory} | figures


def _cell(span: Span) -> tuple[int, str, int | str] | None:
    """Return (stage, kind, micro-batch) of a compute span, None if its name is not an action. With a slice the last is a text: "0.1"."""
    try:
        action = Action.parse(span.name)
    except ScheduleError:
        return None
    return action.stage, action.kind.value, action.microbatch if action.slice == NO_SLICE else action.part


# -- the cut --------------------------------------------------------------------------------------------------------


def _cut(graph: GraphModule, plan: Plan) -> dict[str, Any]:
    """Return the nodes by stage and in graph order, edges within stages, and routes between stages, by index of nodes."""
    stage_of = plan.stage_of
    placed = [node for node in graph.graph.nodes if node.name in stage_of]
    placed.sort(key=lambda node: stage_of[node.name])  # stable
    position = {node.name: index for index, node in enumerate(placed)}
    counts = Counter(stage_of[node.name] for node in placed)
    first = [0, *accumulate(counts[stage] for stage in range(plan.n_stages))]
    edges = [
        (position[source.name], position[node.name])
        for node in placed
        for source in node.all_input_nodes
        if source.name in position and stage_of[source.name] == stage_of[node.name]
    ]
    return {
        "nodes": [(*_names(node), stage_of[node.name]) for node in placed],
        "edges": [(a, b) for a, b in dict.fromkeys(edges) if a < b],
        "routes": list(_cut_routes(plan, placed, position, first)),
        "stages": [
            {"first": first[s], "last": first[s + 1], "device": plan.stages[s].device} for s in range(plan.n_stages)
        ],
    }


def _names(node: Node) -> tuple[str, str]:
    """Return the names of an operation and of the module around it, as the user has them.

    A layer is `layer1.0.conv1`; another operation has its own name after that of its module, `layer1.0.add`.
    """
    from pipecompile.tracing.emit.call_description import printable
    from pipecompile.tracing.node_facts import facts

    module = facts(node).module
    flat = module.replace(".", "_") + "_"
    within = f"{module}.{node.name.removeprefix(flat)}" if module and node.name.startswith(flat) else node.name
    return printable(str(node.target) if node.op == "call_module" else within), printable(module)


def _cut_routes(
    plan: Plan, placed: Sequence[Node], position: Mapping[str, int], first: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yield each route from its source node to its first reader in each consumer.

    A value without a node leaves from the last node of its stage; `first[s]` is the index of the first node of stage s.
    """
    readers = {
        (source.name, plan.stage_of[node.name]): position[node.name]
        for node in reversed(placed)
        for source in node.all_input_nodes
    }
    for route in plan.routes:
        if route.source == HOST:
            continue
        ends = [
            (readers.get((route.value, stage), first[stage]), stage, stage in route.skips)
            for stage in route.consumers
            if stage != HOST
        ]
        source = position.get(route.value, first[route.source + 1] - 1)
        yield {"value": route.value, "source": source, "ends": ends, "nbytes": route.nbytes, "gradient": route.gradient}


# -- what if --------------------------------------------------------------------------------------------------------

_NOTE = (
    "Simulated in this page. For another number of stages the graph was cut again. Peak activations: the highest point of the memory of "
    "a device, as in the table of memory and the curves. The last column is the time for the same number of samples, relative to the "
    "schedule, devices and micro-batches of this report. Select a row of the table to see its timeline, and the line of Python that makes it."
)


def _what_if(what_if: WhatIf, devices: Sequence[str]) -> dict[str, Any]:
    own = {"schedule": what_if.own.name, "devices": what_if.own.devices, "microbatches": what_if.own.microbatches}
    return {
        "own": own,
        "microbatches": what_if.microbatches,
        "costs": {str(count): msgspec.to_builtins(costs) for count, costs in what_if.costs.items()},
        "orders": msgspec.to_builtins(what_if.orders),
        "overlaps": what_if.overlaps,
        "type": devices[0].partition(":")[0] if devices else "",
        "note": _NOTE,
    }
