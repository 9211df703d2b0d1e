"""One page that has everything in it: table, timelines with memory, the cut, what to improve, what if.

    report = template (show/page) + data as JSON        no network, no libraries: it opens anywhere, for good

Times are whole numbers of a tick, a millionth of the step: half of the text, and nobody can see the difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.resources import files
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import msgspec

from pipecompile.errors import ScheduleError
from pipecompile.ir import HOST, Action, Schedule
from pipecompile.ir.plan import Plan
from pipecompile.ir.timeline import COMPUTE, Span, Timeline
from pipecompile.ir.units import BYTES, SECONDS, written
from pipecompile.show.colours import COPY, FILLS, SHADES
from pipecompile.show.table import stage_caption, stage_columns
from pipecompile.tracing.node_facts import facts

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from pipecompile.ir.what_if import WhatIf

__all__ = ["report_html"]

_SCRIPTS = ("draw.js", "simulate.js", "gantt.js", "cut.js", "what_if.js", "main.js")
_TICKS = 1_000_000


def report_html(
    schedule: Schedule,
    predicted: Timeline,
    measured: Timeline | None = None,
    *,
    plan: Plan | None = None,
    graph: GraphModule | None = None,
    advice: Sequence[object] = (),
    what_if: WhatIf | None = None,
    title: str = "",
    seconds: bool = True,
) -> str:
    """The page as text; what is not given is left out. `seconds` False says that times are in the unit of the costs."""
    timelines = {"predicted": predicted} | ({} if measured is None else {"measured": measured})
    names = plan.devices if plan is not None else ()
    data = {
        "title": " · ".join(filter(None, (title, _counts(schedule)))),
        "seconds": seconds,
        "facts": list(_facts(timelines, plan, seconds=seconds)),
        "palette": {kind.value: shades for kind, shades in SHADES.items()},
        "bands": FILLS,
        "copyColour": COPY,
        "devices": [f"{d} · {names[d]}" if d < len(names) else f"device {d}" for d in range(predicted.n_devices)],
        "table": None if plan is None else _table(plan, predicted.bubble),
        "timelines": [_timeline(name, timeline) for name, timeline in timelines.items()],
        "advice": [str(line) for line in advice],
        "cut": None if plan is None or graph is None else _cut(graph, plan),
        "whatIf": None if what_if is None else _what_if(what_if),
    }
    text = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    page = _read("page.html").replace("/*STYLE*/", _read("style.css"))
    script = 'const DATA = JSON.parse(document.getElementById("data").textContent);\n' + "\n".join(map(_read, _SCRIPTS))
    return page.replace("/*SCRIPT*/", script).replace("/*DATA*/", text)


def _read(name: str) -> str:
    return (files("pipecompile.show") / "page" / name).read_text(encoding="utf-8")


def _counts(schedule: Schedule) -> str:
    return f"{schedule.name}, {schedule.n_stages} stages on {schedule.n_devices} devices, {schedule.n_microbatches} micro-batches"


def _facts(timelines: dict[str, Timeline], plan: Plan | None, *, seconds: bool) -> Iterator[tuple[str, str]]:
    for name, timeline in timelines.items():
        step = written(SECONDS, timeline.makespan) if seconds else f"{timeline.makespan:g}"
        yield f"step, {name}", step
        yield f"bubble, {name}", f"{timeline.bubble:.1%}"
        if any(timeline.peak_memory):
            yield f"peak memory, {name}", written(BYTES, max(timeline.peak_memory))
    if plan is not None:
        yield "slowest stage", written(SECONDS, plan.bottleneck)
        yield "no cut below", written(SECONDS, plan.lower_bound)
        yield "cut", f"{plan.status}, gap {plan.gap:.1%}"


def _table(plan: Plan, bubble: float) -> dict[str, Any]:
    columns = [
        {"name": name, "text": name in ("device", "modules"), "cells": cells, "total": total}
        for name, (cells, total) in stage_columns(plan.stages).items()
    ]
    slowest = max(range(plan.n_stages), key=lambda s: plan.stages[s].forward + plan.stages[s].backward)
    return {"columns": columns, "slowest": slowest, "caption": stage_caption(plan, bubble).plain}


# -- timelines ------------------------------------------------------------------------------------------------------


def _timeline(name: str, timeline: Timeline) -> dict[str, Any]:
    origin = min((span.start for span in timeline.spans), default=0.0)
    tick = timeline.makespan / _TICKS or 1.0
    critical = {(span.device, span.track, span.start) for span in timeline.critical_path}

    def extent(span: Span) -> tuple[int, int]:
        start = round((span.start - origin) / tick)
        return start, round((span.end - origin) / tick) - start

    rows = [
        [
            (*cell, *extent(span), int((span.device, span.track, span.start) in critical))
            for span in timeline.compute(device)
            if (cell := _cell(span)) is not None
        ]
        for device in range(timeline.n_devices)
    ]
    copies = sorted((s for s in timeline.spans if s.track != COMPUTE), key=lambda span: span.start)
    return {
        "name": name,
        "tick": tick,
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "rows": rows,
        "copies": [(s.device, s.track.removeprefix("to "), s.name, *extent(s)) for s in copies],
        "memory": [[(round((at - origin) / tick), size) for at, size in curve] for curve in timeline.memory],
        "peaks": timeline.peak_memory,
    }


def _cell(span: Span) -> tuple[int, str, int] | None:
    """What a span computes; a span that is none of a schedule is not drawn."""
    try:
        action = Action.parse(span.name)
    except ScheduleError:
        return None
    return action.stage, action.kind.value, action.microbatch


# -- the cut --------------------------------------------------------------------------------------------------------


def _cut(graph: GraphModule, plan: Plan) -> dict[str, Any]:
    """Nodes in the order of the stages, and in each in that of the graph; an edge within a stage joins two that are apart."""
    placed = [node for node in graph.graph.nodes if node.name in plan.stage_of]
    placed.sort(key=lambda node: plan.stage_of[node.name])  # stable
    position = {node.name: index for index, node in enumerate(placed)}
    stage_of = plan.stage_of
    sizes = [sum(stage == s for stage in (stage_of[node.name] for node in placed)) for s in range(plan.n_stages)]
    first = [0, *accumulate(sizes)]
    edges = [
        (position[source.name], position[node.name])
        for node in placed
        for source in node.all_input_nodes
        if source.name in position and stage_of[source.name] == stage_of[node.name]
    ]
    reads = {
        (source.name, stage_of[node.name]): position[node.name]
        for node in reversed(placed)
        for source in node.all_input_nodes
    }
    routes = []
    for route in plan.routes:
        if route.source == HOST:
            continue
        ends = [
            (reads.get((route.value, stage), first[stage]), stage, stage in route.skips)
            for stage in route.consumers
            if stage != HOST
        ]
        source = position.get(route.value, first[route.source + 1] - 1)
        routes.append(
            {"value": route.value, "source": source, "ends": ends, "nbytes": route.nbytes, "gradient": route.gradient}
        )
    return {
        "nodes": [(node.name, facts(node).module, stage_of[node.name]) for node in placed],
        "edges": [(a, b) for a, b in dict.fromkeys(edges) if a < b],
        "routes": routes,
        "stages": [
            {"first": first[s], "last": first[s + 1], "device": plan.stages[s].device} for s in range(plan.n_stages)
        ],
    }


# -- what if --------------------------------------------------------------------------------------------------------

_NOTE = (
    "Simulated here, over a chain: stage s hands all that it sends ahead to stage s + 1. For another number of stages the graph "
    "was cut anew. The last column is the time for the same number of samples, with the schedule, devices and micro-batches of "
    "this report as 1. A row of the table shows its timeline."
)


def _what_if(given: WhatIf) -> dict[str, Any]:
    own = {"schedule": given.own.name, "devices": given.own.devices, "microbatches": given.own.microbatches}
    return {
        "own": own,
        "microbatches": given.microbatches,
        "costs": {str(count): msgspec.to_builtins(costs) for count, costs in given.costs.items()},
        "orders": msgspec.to_builtins(given.orders),
        "note": _NOTE,
    }
