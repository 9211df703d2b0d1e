"""What makes a problem, or a partition of one, illegal: every fault as one line of text, none of them raised here.

A cycle of the precedence is a fault, unless one group holds it whole. A cycle that only exists because groups were merged
(a before b before c, with a and c in one group) is legal: it says that all of it shares a stage. That pins and pairs apart
may contradict the rest is no fault either, but an infeasible problem: see `steering`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from math import isfinite
from typing import TYPE_CHECKING

import networkx as nx

if TYPE_CHECKING:
    from pipecompile.partitioners.problem import Problem

__all__ = ["assignment_faults", "problem_faults"]


def problem_faults(problem: Problem) -> list[str]:
    """Everything that is wrong with a problem, in the order of its fields. O(nodes + precedence + tensors)."""
    return [*_name_faults(problem), *_number_faults(problem), *_length_faults(problem), *_cycle_faults(problem)]


def assignment_faults(problem: Problem, stage_of: Mapping[str, int], n_stages: int) -> list[str]:
    """Where an assignment breaks the problem's rules, memory apart: coverage, range, precedence, groups, steering."""
    names = [node.name for node in problem.nodes]
    faults = [f"node {name!r} has no stage" for name in names if name not in stage_of]
    faults += [f"node {name!r} is not in the problem" for name in stage_of.keys() - set(names)]
    for name, stage in stage_of.items():
        if not 0 <= stage < n_stages:
            faults.append(f"node {name!r} is in stage {stage}, expected 0 to {n_stages - 1}")
    return [*faults, *_order_faults(problem, stage_of), *_place_faults(problem, stage_of)]


def _order_faults(problem: Problem, stage_of: Mapping[str, int]) -> Iterator[str]:
    for a, b in problem.precedence:
        if a in stage_of and b in stage_of and stage_of[a] > stage_of[b]:
            yield f"{a!r} precedes {b!r}, yet is in stage {stage_of[a]} and {b!r} in stage {stage_of[b]}"
    for a, b in problem.apart:
        if a in stage_of and b in stage_of and stage_of[a] >= stage_of[b]:
            yield f"{a!r} must be in a stage before {b!r}, yet is in {stage_of[a]} and {b!r} in {stage_of[b]}"


def _place_faults(problem: Problem, stage_of: Mapping[str, int]) -> Iterator[str]:
    for number, group in enumerate(problem.groups):
        stages = {stage_of[name]: name for name in group if name in stage_of}
        if len(stages) > 1:
            where = ", ".join(f"{stages[stage]!r} in {stage}" for stage in sorted(stages))
            yield f"group {number} is spread over {len(stages)} stages: {where}"
    for name, stage in problem.pins.items():
        if stage_of.get(name, stage) != stage:
            yield f"node {name!r} is pinned to stage {stage}, yet is in {stage_of[name]}"


# -- names ----------------------------------------------------------------------------------------------------------


def _name_faults(problem: Problem) -> Iterator[str]:
    count = Counter(node.name for node in problem.nodes)
    yield from (f"node {name!r} appears {times} times" for name, times in count.items() if times > 1)
    for place, names in _references(problem):
        yield from (f"{place} names {name!r}, which is no node" for name in names if name not in count)
    for number, tensor in enumerate(problem.tensors):
        place = f"tensor {number} from {tensor.source!r}"
        if not tensor.consumers:
            yield f"{place} has no consumer"
        if tensor.source in tensor.consumers:
            yield f"{place} is consumed by its own source"
        for name, times in Counter(tensor.consumers).items():
            if times > 1:
                yield f"{place} names its consumer {name!r} {times} times"
    yield from (f"apart {number} names {a!r} twice" for number, (a, b) in enumerate(problem.apart) if a == b)
    yield from (f"shared {number} has no node" for number, shared in enumerate(problem.shared) if not shared.nodes)


def _references(problem: Problem) -> Iterator[tuple[str, Iterable[str]]]:
    yield from ((f"precedence {number}", pair) for number, pair in enumerate(problem.precedence))
    yield from ((f"tensor {number}", (t.source, *t.consumers)) for number, t in enumerate(problem.tensors))
    yield from ((f"group {number}", group) for number, group in enumerate(problem.groups))
    yield from ((f"shared {number}", shared.nodes) for number, shared in enumerate(problem.shared))
    yield from ((f"apart {number}", pair) for number, pair in enumerate(problem.apart))
    yield "pins", problem.pins


# -- numbers --------------------------------------------------------------------------------------------------------


def _number_faults(problem: Problem) -> Iterator[str]:
    for node in problem.nodes:
        for field in ("time", "forward", "bytes", "activation"):
            yield from _number_fault(f"{field} of node {node.name!r}", getattr(node, field))
        if node.forward > node.time * (1 + 1e-9) >= 0:
            yield f"forward of node {node.name!r} is {node.forward:g}, expected at most its time, {node.time:g}"
    for number, tensor in enumerate(problem.tensors):
        for field in ("time", "bytes"):
            yield from _number_fault(f"{field} of tensor {number} from {tensor.source!r}", getattr(tensor, field))
    for number, shared in enumerate(problem.shared):
        yield from _number_fault(f"bytes of shared {number}", shared.bytes)
    for name, stage in problem.pins.items():
        yield from _number_fault(f"pin of {name!r}", stage)
    if isinstance(problem.memory_limit, int | float):
        yield from _number_fault("memory_limit", problem.memory_limit)
    yield from _list_faults(problem)


def _list_faults(problem: Problem) -> Iterator[str]:
    for field, unit, values in _lists(problem):
        for place, value in enumerate(values):
            if field != "links":
                yield from _number_fault(f"{field} of {unit} {place}", value)
            if field == "speed" and value == 0:
                yield f"speed of {unit} {place} is 0, expected more"
    for a, row in enumerate(problem.links or ()):
        for b, value in enumerate(row):
            yield from _number_fault(f"links from device {a} to {b}", value)


def _number_fault(what: str, value: float) -> Iterator[str]:
    if not isfinite(value) or value < 0:
        yield f"{what} is {value}, expected a finite number that is not negative"


# -- lists of stages and devices ------------------------------------------------------------------------------------


def _lists(problem: Problem) -> list[tuple[str, str, tuple[float, ...]]]:
    """(field, what it counts, its values) of every field that is a list."""
    device = "stage" if problem.placement is None else "device"
    links = None if problem.links is None else tuple(float(len(row)) for row in problem.links)
    fields = [("memory_limit", device, problem.memory_limit), ("speed", device, problem.speed), ("links", device, links),
              ("placement", "stage", problem.placement), ("in_flight", "stage", problem.in_flight),
              ("recompute", "stage", problem.recompute)]  # fmt: skip
    return [(field, unit, value) for field, unit, value in fields if isinstance(value, tuple)]


def _length_faults(problem: Problem) -> Iterator[str]:
    lists = _lists(problem)
    for unit in ("stage", "device"):
        counts = [(field, len(values)) for field, counted, values in lists if counted == unit]
        if len({count for _, count in counts}) > 1:
            yield f"lists per {unit} disagree: " + ", ".join(f"{field} has {count}" for field, count in counts)
        yield from (f"{field} is an empty list" for field, count in counts if not count)
        most = max(problem.placement or (0,))
        for field, count in counts:
            if unit == "device" and count <= most:
                yield f"placement names device {most}, yet {field} has {count}"
    if any(len(row) != len(problem.links or ()) for row in problem.links or ()):
        yield f"links has {len(problem.links or ())} rows, expected as many columns"


# -- cycles ---------------------------------------------------------------------------------------------------------


def _cycle_faults(problem: Problem) -> Iterator[str]:
    """One fault per strongly connected component of the precedence, without the pairs inside one group."""
    group_of: dict[str, set[int]] = {}
    for number, group in enumerate(problem.groups):
        for name in group:
            group_of.setdefault(name, set()).add(number)
    pairs = [(a, b) for a, b in problem.precedence if not group_of.get(a, set()) & group_of.get(b, set())]
    graph = nx.DiGraph(pairs)
    for component in nx.strongly_connected_components(graph):
        start = min(component)
        if len(component) > 1 or graph.has_edge(start, start):
            cycle = nx.find_cycle(graph.subgraph(component), start)
            yield "precedence has a cycle: " + " -> ".join([cycle[0][0], *(b for _, b in cycle)])
