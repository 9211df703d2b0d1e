"""Verifier of problems and partitions. All faults are collected, one line of text each, and raised in one VerifyError.

A cycle of the precedence is a fault unless one group contains all its nodes. A cycle that exists only because groups were
merged (a before b before c, with a and c in one group) is legal: its nodes share a stage. User constraints that contradict
each other are not a fault of the problem but make it infeasible: see `constraints.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from numbers import Real

import networkx as nx

from pipecompile.errors import VerifyError
from pipecompile.partitioners.field_types import type_faults
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import fits, stage_loads
from pipecompile.partitioners.problem import Problem
from pipecompile.text.input_checks import LARGEST, float_of
from pipecompile.text.shown_value import shown

__all__ = ["assignment_faults", "memory_text", "problem_faults", "verify_assignment", "verify_problem"]

_MOST_DEVICES = 100_000
"""Devices of a machine: each has numbers of its own."""


def verify_problem(problem: Problem) -> None:
    """Raise VerifyError with every fault: unknown or duplicate names, cycles, illegal numbers, lists of unequal length."""
    if faults := problem_faults(problem):
        raise VerifyError(
            f"partition problem {shown(problem.name)}"
            if isinstance(problem.name, str) and problem.name
            else "partition problem",
            faults,
        )


def problem_faults(problem: Problem) -> list[str]:
    """Return every fault of a problem, in the order of its fields; of types alone if there are any. O(nodes + precedence + tensors)."""
    if faults := type_faults(problem):
        return faults
    return [*_name_faults(problem), *_number_faults(problem), *_length_faults(problem), *_cycle_faults(problem)]


def verify_assignment(
    problem: Problem, stage_of: Mapping[str, int], n_stages: int, recompute: Sequence[bool] | None = None
) -> None:
    """Raise VerifyError with every fault of an assignment: coverage, range, precedence, groups, constraints, memory."""
    faults = assignment_faults(problem, stage_of, n_stages)
    placed = {node.name: stage_of.get(node.name, -1) for node in problem.nodes}
    machine = Machine.of(problem, n_stages)
    for s, (required, actual) in enumerate(zip(machine.recompute, recompute or (), strict=False)):
        if required is not None and required != actual:
            words = ("recomputes", "must not") if actual else ("does not recompute", "must")
            faults.append(f"stage {s} {words[0]}, but the problem says that it {words[1]}")
    if all(0 <= stage < n_stages for stage in placed.values()):
        unit = "stage" if machine.is_one_to_one else "device"
        loads = stage_loads(problem, placed, n_stages, recompute)
        for number, (load, limit) in enumerate(zip(loads, machine.memory_limit, strict=True)):
            if not fits(load.memory, limit):
                memory = memory_text(load.memory)
                faults.append(f"{unit} {number} holds {memory}, its limit is {memory_text(limit)}")
    if faults:
        raise VerifyError("partition", faults)


def assignment_faults(problem: Problem, stage_of: Mapping[str, int], n_stages: int) -> list[str]:
    """Return every fault of an assignment but memory: coverage, range, precedence, groups, constraints."""
    names = [node.name for node in problem.nodes]
    faults = [f"node {shown(name)} has no stage" for name in names if name not in stage_of]
    faults += [f"node {shown(name)} is not in the problem" for name in stage_of.keys() - set(names)]
    for name, stage in stage_of.items():
        if not 0 <= stage < n_stages:
            faults.append(f"node {shown(name)} is in stage {stage}, expected 0 to {n_stages - 1}")
    return [*faults, *_order_faults(problem, stage_of), *_group_and_pin_faults(problem, stage_of)]


def memory_text(size: float) -> str:
    """Return a size in bytes as text, from 1 MiB on in MiB or GiB."""
    for unit, factor in (("GiB", 2.0**30), ("MiB", 2.0**20)):
        if size >= factor:
            return f"{size / factor:.6g} {unit}"
    return f"{size:.6g} byte" + ("" if size == 1 else "s")


def _order_faults(problem: Problem, stage_of: Mapping[str, int]) -> Iterator[str]:
    for a, b in problem.precedence:
        if a in stage_of and b in stage_of and stage_of[a] > stage_of[b]:
            yield f"{shown(a)} precedes {shown(b)}, yet is in stage {stage_of[a]} and {shown(b)} in stage {stage_of[b]}"
    for a, b in problem.apart:
        if a in stage_of and b in stage_of and stage_of[a] >= stage_of[b]:
            yield f"{shown(a)} must be in a stage before {shown(b)}, yet is in {stage_of[a]} and {shown(b)} in {stage_of[b]}"


def _group_and_pin_faults(problem: Problem, stage_of: Mapping[str, int]) -> Iterator[str]:
    for number, group in enumerate(problem.groups):
        stages = {stage_of[name]: name for name in group if name in stage_of}
        if len(stages) > 1:
            where = ", ".join(f"{shown(stages[stage])} in {stage}" for stage in sorted(stages))
            yield f"group {number} is spread over {len(stages)} stages: {where}"
    for name, stage in problem.pins.items():
        if stage_of.get(name, stage) != stage:
            yield f"node {shown(name)} is pinned to stage {stage}, yet is in {stage_of[name]}"


# -- names ----------------------------------------------------------------------------------------------------------


def _name_faults(problem: Problem) -> Iterator[str]:
    counts = Counter(node.name for node in problem.nodes)
    yield from (f"node {shown(name)} appears {count} times" for name, count in counts.items() if count > 1)
    for place, names in _references(problem):
        yield from (f"{place} names {shown(name)}, which is not a node" for name in names if name not in counts)
    for number, tensor in enumerate(problem.tensors):
        place = f"tensor {number} from {shown(tensor.source)}"
        if not tensor.consumers:
            yield f"{place} has no consumer"
        if tensor.source in tensor.consumers:
            yield f"{place} is consumed by its own source"
        for name, count in Counter(tensor.consumers).items():
            if count > 1:
                yield f"{place} names its consumer {shown(name)} {count} times"
    yield from (f"apart {number} names {shown(a)} twice" for number, (a, b) in enumerate(problem.apart) if a == b)
    yield from (f"shared {number} has no node" for number, shared in enumerate(problem.shared) if not shared.nodes)


def _references(problem: Problem) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield (place, names of nodes that it refers to)."""
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
            yield from _number_fault(f"{field} of node {shown(node.name)}", getattr(node, field))
        if 0 <= node.time < node.forward <= LARGEST and node.forward > node.time * (1 + 1e-9):
            yield f"forward of node {shown(node.name)} is {node.forward:g}, expected at most its time, {node.time:g}"
    for number, tensor in enumerate(problem.tensors):
        for field in ("time", "bytes"):
            yield from _number_fault(f"{field} of tensor {number} from {shown(tensor.source)}", getattr(tensor, field))
    for number, shared in enumerate(problem.shared):
        yield from _number_fault(f"bytes of shared {number}", shared.bytes)
    for name, stage in problem.pins.items():
        yield from _number_fault(f"pin of {shown(name)}", stage)
    if isinstance(problem.memory_limit, Real):
        yield from _number_fault("memory_limit", problem.memory_limit)
    yield from _list_faults(problem)
    if _last_device(problem) >= _MOST_DEVICES:
        yield f"placement names device {shown(_last_device(problem))}, expected less than {_MOST_DEVICES:,}"


def _list_faults(problem: Problem) -> Iterator[str]:
    for field, unit, values in _lists(problem):
        for index, value in enumerate(values):
            if field != "links":
                yield from _number_fault(f"{field} of {unit} {index}", value)
            if field == "speed" and 0 <= value < 1 / LARGEST:
                yield f"speed of {unit} {index} is {shown(value)}, expected at least {1 / LARGEST:g}"
    for a, row in enumerate(problem.links or ()):
        for b, value in enumerate(row):
            yield from _number_fault(f"links from device {a} to {b}", value)


def _number_fault(subject: str, value: float) -> Iterator[str]:
    if not 0 <= value < inf:
        yield f"{subject} is {shown(value)}, expected a finite number that is not negative"
    elif float_of(value) > LARGEST:  # type: ignore[arg-type]
        yield f"{subject} is {shown(value)}, expected at most {LARGEST:g}"


# -- lists of stages and devices ------------------------------------------------------------------------------------


def _lists(problem: Problem) -> list[tuple[str, str, tuple[float, ...]]]:
    """Return (field, "stage" or "device", values) of every field that is a list; for `links`, the lengths of its rows."""
    device = "stage" if problem.placement is None else "device"
    links = None if problem.links is None else tuple(float(len(row)) for row in problem.links)
    fields = [("memory_limit", device, problem.memory_limit), ("speed", device, problem.speed), ("links", device, links),
              ("placement", "stage", problem.placement), ("in_flight", "stage", problem.in_flight),
              ("recompute", "stage", problem.recompute)]  # fmt: skip
    return [(field, unit, value) for field, unit, value in fields if isinstance(value, tuple)]


def _length_faults(problem: Problem) -> Iterator[str]:
    lists = _lists(problem)
    for unit in ("stage", "device"):
        lengths = [(field, len(values)) for field, field_unit, values in lists if field_unit == unit]
        if len({length for _, length in lengths}) > 1:
            yield f"lists per {unit} disagree: " + ", ".join(f"{field} has {length}" for field, length in lengths)
        yield from (f"{field} is an empty list" for field, length in lengths if not length)
        last_device = _last_device(problem)
        for field, length in lengths:
            if unit == "device" and length <= last_device:
                yield f"placement names device {last_device}, yet {field} has {length}"
    if any(len(row) != len(problem.links or ()) for row in problem.links or ()):
        n_rows = len(problem.links or ())
        yield f"links has {n_rows} row{'s' * (n_rows != 1)}, expected as many columns"


def _last_device(problem: Problem) -> int:
    return max(problem.placement or (0,))


# -- cycles ---------------------------------------------------------------------------------------------------------


_MOST_OF_A_CYCLE = 8
"""Nodes of a cycle that are all written."""


def _cycle_faults(problem: Problem) -> Iterator[str]:
    """Yield one fault per strongly connected component of the precedence, without the pairs inside one group."""
    groups_of: dict[str, set[int]] = {}
    for number, group in enumerate(problem.groups):
        for name in group:
            groups_of.setdefault(name, set()).add(number)
    pairs = [(a, b) for a, b in problem.precedence if not groups_of.get(a, set()) & groups_of.get(b, set())]
    graph = nx.DiGraph(pairs)
    for component in nx.strongly_connected_components(graph):
        start = min(component)
        if len(component) > 1 or graph.has_edge(start, start):
            cycle = nx.find_cycle(graph.subgraph(component), start)
            names = [shown(name) for name in (cycle[0][0], *(b for _, b in cycle))]
            few = names if len(names) <= _MOST_OF_A_CYCLE else [*names[:3], "...", *names[-2:]]
            yield f"precedence has a cycle: {' -> '.join(few)}"
