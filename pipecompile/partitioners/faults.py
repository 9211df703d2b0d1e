"""What makes a problem, or a partition of one, illegal: every fault as one line of text, none of them raised here.

A cycle of the precedence is a fault, unless one group holds it whole. A cycle that only exists because groups were merged
(a before b before c, with a and c in one group) is legal: it says that all of it shares a stage.
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
    """Where an assignment breaks the problem's rules, memory apart: coverage, range, precedence, groups."""
    names = [node.name for node in problem.nodes]
    faults = [f"node {name!r} has no stage" for name in names if name not in stage_of]
    faults += [f"node {name!r} is not in the problem" for name in stage_of.keys() - set(names)]
    for name, stage in stage_of.items():
        if not 0 <= stage < n_stages:
            faults.append(f"node {name!r} is in stage {stage}, expected 0 to {n_stages - 1}")
    for a, b in problem.precedence:
        if a in stage_of and b in stage_of and stage_of[a] > stage_of[b]:
            faults.append(f"{a!r} precedes {b!r}, yet is in stage {stage_of[a]} and {b!r} in stage {stage_of[b]}")
    for number, group in enumerate(problem.groups):
        stages = {stage_of[name]: name for name in group if name in stage_of}
        if len(stages) > 1:
            where = ", ".join(f"{stages[stage]!r} in {stage}" for stage in sorted(stages))
            faults.append(f"group {number} is spread over {len(stages)} stages: {where}")
    return faults


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


def _references(problem: Problem) -> Iterator[tuple[str, Iterable[str]]]:
    yield from ((f"precedence {number}", pair) for number, pair in enumerate(problem.precedence))
    yield from ((f"tensor {number}", (t.source, *t.consumers)) for number, t in enumerate(problem.tensors))
    yield from ((f"group {number}", group) for number, group in enumerate(problem.groups))


def _number_faults(problem: Problem) -> Iterator[str]:
    for node in problem.nodes:
        for field in ("time", "bytes", "activation"):
            yield from _number_fault(f"{field} of node {node.name!r}", getattr(node, field))
    for number, tensor in enumerate(problem.tensors):
        yield from _number_fault(f"time of tensor {number} from {tensor.source!r}", tensor.time)
    for field, values in _per_stage(problem):
        for stage, value in enumerate(values):
            yield from _number_fault(f"{field} of stage {stage}", value)
            if field == "speed" and value == 0:
                yield f"speed of stage {stage} is 0, expected more"
    if isinstance(problem.memory_limit, int | float):
        yield from _number_fault("memory_limit", problem.memory_limit)


def _number_fault(what: str, value: float) -> Iterator[str]:
    if not isfinite(value) or value < 0:
        yield f"{what} is {value}, expected a finite number that is not negative"


def _per_stage(problem: Problem) -> list[tuple[str, tuple[float, ...]]]:
    fields = {"memory_limit": problem.memory_limit, "in_flight": problem.in_flight, "speed": problem.speed}
    return [(field, value) for field, value in fields.items() if isinstance(value, tuple)]


def _length_faults(problem: Problem) -> Iterator[str]:
    lists = _per_stage(problem)
    if len({len(values) for _, values in lists}) > 1:
        yield "lists per stage disagree: " + ", ".join(f"{field} has {len(values)}" for field, values in lists)
    yield from (f"{field} is an empty list" for field, values in lists if not values)


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
