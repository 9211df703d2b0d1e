"""Types of the fields of a problem: numbers, names, pairs, lists and flags. `verify.py` reads the values afterwards.

    Problem(nodes, groups=("a", "b"))     group 0 is 'a', expected a tuple of names: groups=(("a", "b"),)
    Problem(nodes, recompute=True)        recompute is True, expected None, "auto", or a flag per stage: recompute=(True, False)

NumPy's numbers count as numbers. A bool is not a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from numbers import Integral, Real
from typing import Any

from pipecompile.partitioners.problem import Node, Problem, Shared, Tensor
from pipecompile.text.shown_value import shown

__all__ = ["type_faults"]


def type_faults(problem: Problem) -> list[str]:
    """Return a fault for each field, or entry of a field, that has another type than the field. Linear."""
    faults = [*_sequence_faults(problem), *_flag_faults(problem), *_machine_faults(problem), *_pin_faults(problem)]
    return faults or [*_node_faults(problem), *_tensor_faults(problem), *_shared_faults(problem)]


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_names(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(name, str) for name in value)


def _is_pair(value: object) -> bool:
    return _is_names(value) and len(value) == 2  # type: ignore[arg-type]


def _is_numbers(value: object) -> bool:
    return isinstance(value, tuple) and all(map(_is_number, value))


_SEQUENCES: tuple[tuple[str, str, Callable[[object], bool], str, str], ...] = (
    ("nodes", "node", lambda one: isinstance(one, Node), "a Node", '(Node("a", 1.0),)'),
    ("precedence", "precedence", _is_pair, "a pair of names", '(("a", "b"),)'),
    ("tensors", "tensor", lambda one: isinstance(one, Tensor), "a Tensor", '(Tensor("a", ("b",)),)'),
    ("groups", "group", _is_names, "a tuple of names", '(("a", "b"),)'),
    ("shared", "shared", lambda one: isinstance(one, Shared), "a Shared", '(Shared(("a", "b"), 1e6),)'),
    ("apart", "apart", _is_pair, "a pair of names", '(("a", "b"),)'),
)
"""(field, name of an entry, test of an entry, expected entry, right form) of the fields that are tuples."""

_PER_STAGE: tuple[tuple[str, Callable[[object], bool], str, str], ...] = (
    ("memory_limit", _is_number, "None, bytes, or bytes per device", "(16e9, 16e9)"),
    ("in_flight", _is_number, "None, or a number per stage", "(2.0, 1.0)"),
    ("speed", _is_number, "None, or a number per device", "(1.0, 0.5)"),
    ("placement", _is_whole, "None, or a device per stage", "(0, 1)"),
    ("links", _is_numbers, "None, or a row of numbers per device", "((1.0, 2.0), (2.0, 1.0))"),
    ("recompute", _is_flag, 'None, "auto", or a flag per stage', "(True, False)"),
)
"""(field, test of an entry, expected, right form) of the fields that are None or a tuple with an entry per stage or device."""


def _sequence_faults(problem: Problem) -> Iterator[str]:
    for field, entry, is_right, expected, form in _SEQUENCES:
        values = getattr(problem, field)
        if not isinstance(values, tuple):
            yield f"{field} is {shown(values)}, expected a tuple: {field}={form}"
            continue
        for number, value in enumerate(values):
            if not is_right(value):
                yield f"{entry} {number} is {shown(value)}, expected {expected}: {field}={form}"


def _flag_faults(problem: Problem) -> Iterator[str]:
    for field in ("multicast", "overlap"):
        if not _is_flag(value := getattr(problem, field)):
            yield f"{field} is {shown(value)}, expected a bool: {field}=True"
    if not isinstance(problem.name, str):
        yield f'name is {shown(problem.name)}, expected a text: name="model"'


def _machine_faults(problem: Problem) -> Iterator[str]:
    for field, is_right, expected, form in _PER_STAGE:
        value = getattr(problem, field)
        if value is None or (field == "memory_limit" and _is_number(value)) or _is_auto(field, value):
            continue
        if not isinstance(value, tuple):
            yield f"{field} is {shown(value)}, expected {expected}: {field}={form}"
            continue
        for number, each in enumerate(value):
            if not is_right(each):
                yield f"{field}[{number}] is {shown(each)}, expected {expected}: {field}={form}"


def _is_auto(field: str, value: object) -> bool:
    return field == "recompute" and isinstance(value, str) and value == "auto"


def _pin_faults(problem: Problem) -> Iterator[str]:
    pins: Any = problem.pins
    if not isinstance(pins, dict):
        yield f'pins is {shown(pins)}, expected a dict of the stages of nodes: pins={{"a": 0}}'
        return
    for name, stage in pins.items():
        if not (isinstance(name, str) and _is_whole(stage)):
            yield f'pins has {shown(name)}: {shown(stage)}, expected a name and a stage: pins={{"a": 0}}'


def _node_faults(problem: Problem) -> Iterator[str]:
    for number, node in enumerate(problem.nodes):
        if not isinstance(node.name, str):
            yield f'name of node {number} is {shown(node.name)}, expected a text: Node("a", 1.0)'
        for field in ("time", "bytes", "activation", "forward"):
            if not _is_number(value := getattr(node, field)):
                yield f'{field} of node {shown(node.name)} is {shown(value)}, expected a number: Node("a", {field}=1.0)'


def _tensor_faults(problem: Problem) -> Iterator[str]:
    for number, tensor in enumerate(problem.tensors):
        if not (isinstance(tensor.source, str) and _is_names(tensor.consumers)):
            yield f'tensor {number} is {shown(tensor)}, expected a name and a tuple of names: Tensor("a", ("b",))'
        for field in ("time", "bytes"):
            if not _is_number(value := getattr(tensor, field)):
                yield f'{field} of tensor {number} is {shown(value)}, expected a number: Tensor("a", ("b",), {field}=1.0)'


def _shared_faults(problem: Problem) -> Iterator[str]:
    for number, shared in enumerate(problem.shared):
        if not _is_names(shared.nodes):
            yield f'nodes of shared {number} is {shown(shared.nodes)}, expected a tuple of names: Shared(("a", "b"), 1e6)'
        if not _is_number(shared.bytes):
            yield f'bytes of shared {number} is {shown(shared.bytes)}, expected a number: Shared(("a", "b"), 1e6)'
