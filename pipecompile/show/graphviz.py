"""The cut graph as Graphviz text: a cluster per stage, modules as boxes, crossing values with their sizes.

A traced graph has one node per call, too many for a picture. Calls of one stage inside one module share a box. The
depth of these modules is the largest that leaves few boxes: blocks for a ResNet, single calls for a small model. A
value that skips a stage is drawn bold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipecompile.ir.plan import Plan
from pipecompile.show.colours import FILLS
from pipecompile.text.units import BYTES, COUNT, SECONDS, written

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

__all__ = ["graph_dot"]

_MOST_BOXES, _DEEPEST = 48, 8
"""Largest number of boxes, and of parts of a module path."""
_HEAD = """digraph pipeline {
  graph [fontname="Helvetica", fontsize=12, labeljust=l, nodesep=0.25, ranksep=0.35, newrank=true];
  node [shape=box, style="rounded,filled", fillcolor=white, color="#9aa0a8", fontname="Helvetica", fontsize=10];
  edge [color="#6b7078", fontname="Helvetica", fontsize=9, arrowsize=0.6];
"""


@dataclass(frozen=True, slots=True)
class _Box:
    """All calls of one stage under a module path, or one call. Stage -1 has the inputs and the output."""

    stage: int
    label: str
    call: str = ""


_Boxes = dict["Node", _Box]


def graph_dot(graph: GraphModule, plan: Plan, *, depth: int | None = None) -> str:
    """Return the DOT text of a traced graph cut as in the plan.

    `depth` is the number of parts of a module path to keep; None: the largest number that leaves at most 48 boxes.
    """
    boxes = _boxes(graph, plan, depth)
    names = {box: f"n{number}" for number, box in enumerate(dict.fromkeys(boxes.values()))}
    calls = {box: sum(other == box for other in boxes.values()) for box in names}
    lines = [_box_line(box, names[box], 0) for box in names if box.stage < 0]
    for stage in range(plan.n_stages):
        lines += [f"  subgraph cluster_{stage} {{", f"    label={_quoted(_stage_label(plan, stage))};"]
        lines += [f'    style="rounded,filled"; color="#c4c8ce"; fillcolor="{FILLS[stage % len(FILLS)]}";']
        lines += [f"  {_box_line(box, names[box], calls[box])}" for box in names if box.stage == stage]
        lines += ["  }"]
    lines += [f"  {names[a]} -> {names[b]}{_attributes(look)};" for (a, b), look in _edges(plan, boxes).items()]
    return _HEAD + "\n".join(lines) + "\n}\n"


def _boxes(graph: GraphModule, plan: Plan, depth: int | None) -> _Boxes:
    """Return the box of each node; none for sizes that every stage computes and for attributes without a stage."""
    placed = [node for node in graph.graph.nodes if node.name in plan.stage_of]
    for parts in range(_DEEPEST, -1, -1) if depth is None else [depth]:
        boxes = _collapsed(placed, plan.stage_of, parts)
        if len(set(boxes.values())) <= _MOST_BOXES:
            break
    ends = {node: _Box(-1, node.name) for node in graph.graph.nodes if node.op in ("placeholder", "output")}
    return {node: box for node in graph.graph.nodes if (box := ends.get(node) or boxes.get(node))}


def _collapsed(nodes: Sequence[Node], stage_of: Mapping[str, int], depth: int) -> _Boxes:
    """Return one box per module at `depth`, and one box per call that is less deep."""
    boxes = {}
    for node in nodes:
        path = _path(node).split(".")
        call = node.name if len(path) <= depth else ""
        boxes[node] = _Box(stage_of[node.name], ".".join(path[:depth]), call)
    return boxes


def _path(node: Node) -> str:
    """Return the name of the called module, or of the innermost module around the call with the name of the
    function.
    """
    from pipecompile.tracing.emit.call_description import model_path, printable  # imports torch
    from pipecompile.tracing.node_facts import facts

    if node.op == "call_module":
        return printable(model_path(str(node.target)))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.name)
    return printable(f"{facts(node).module}.{name}".strip("."))


def _edges(plan: Plan, boxes: _Boxes) -> dict[tuple[_Box, _Box], dict[str, str]]:
    """Return pairs of boxes in graph order with their attributes. A value's size stands once per receiving stage."""
    edges: dict[tuple[_Box, _Box], dict[str, str]] = {}
    sizes: dict[tuple[_Box, _Box], float] = {}
    labelled: set[tuple[str, int]] = set()
    sizes_of_routes = {route.value: route.nbytes for route in plan.routes}
    for node, user in _uses(boxes):
        source, target = boxes[node], boxes[user]
        if source == target:
            continue
        look = edges.setdefault((source, target), {})
        if source.stage == target.stage:
            continue
        if node.name in sizes_of_routes and (node.name, target.stage) not in labelled:
            labelled.add((node.name, target.stage))
            sizes[source, target] = sizes.get((source, target), 0.0) + sizes_of_routes[node.name]
            look["label"] = written(BYTES, sizes[source, target])
        if source.stage >= 0 and target.stage > source.stage + 1:
            look |= {"penwidth": "2.6", "color": "#c2452d", "fontcolor": "#c2452d", "style": "bold", "class": "skip"}
    return edges


def _uses(boxes: Mapping[Node, _Box]) -> Iterator[tuple[Node, Node]]:
    return ((node, user) for node in boxes for user in node.users if user in boxes)


def _stage_label(plan: Plan, stage: int) -> str:
    label = f"stage {stage} · {plan.devices[plan.placement[stage]]}"
    for row in plan.stages:
        if row.stage == stage:
            label += f" · {written(SECONDS, row.forward + row.backward)} · {written(COUNT, row.parameters)} parameters"
    return label


def _box_line(box: _Box, name: str, calls: int) -> str:
    label = (box.label or "(root)") + (f"\n{calls} calls" if calls > 1 else "")
    return f"  {name} [label={_quoted(label)}{', shape=ellipse, style=solid' if box.stage < 0 else ''}];"


def _attributes(look: Mapping[str, str]) -> str:
    return " [" + ", ".join(f"{key}={_quoted(value)}" for key, value in look.items()) + "]" if look else ""


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
