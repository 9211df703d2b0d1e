"""Comparison of two calls of a model by their nodes: whether the second is recorded as the first was."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import BuiltinMethodType, CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import fx

from pipecompile.tracing.emit.call_objects import HeldObject
from pipecompile.tracing.emit.closures import tensor_cells
from pipecompile.tracing.emit.made_objects import is_state, parts_of
from pipecompile.tracing.fakes.batch_symbol import expression_of
from pipecompile.tracing.guards.strict_equality import is_same
from pipecompile.tracing.node_facts import facts, value_of

__all__ = ["constant_nodes", "recorded_alike"]


def recorded_alike(first: Sequence[fx.Node], second: Sequence[fx.Node], constants: set[fx.Node]) -> bool:
    """Return whether the second call has the nodes of the first, with the same arguments.

    It may leave out `constants` of the first call, and use their results instead, and call what returns such a result as it is.
    """
    same: dict[fx.Node, fx.Node] = {}
    start = 0
    for node in second:
        remaining = enumerate(first[start:], start)
        place = next((at for at, old in remaining if old not in constants or _equal(old, node, same)), None)
        if place is not None and _equal(first[place], node, same):
            same[node], start = first[place], place + 1
        elif (source := _returned_argument(node)) is not None:
            same[node] = same.get(source, source)
        else:
            return False
    used = {source for node in second for source in node.all_input_nodes if source in set(first)}
    return used <= constants and all(old in constants for old in first[start:])


def _returned_argument(node: fx.Node) -> fx.Node | None:
    """Return the argument that the call returned as it is and did not write, as `table.to(dtype)` does with a converted table."""
    if _has_effects(node) or not isinstance(value_of(node), torch.Tensor):
        return None
    return next((source for source in node.all_input_nodes if value_of(source) is value_of(node)), None)


def constant_nodes(nodes: Sequence[fx.Node], *, training: bool) -> set[fx.Node]:
    """Return the nodes computed from constants alone that write nothing and draw no random numbers.

    Parameters count as constants in evaluation mode.
    """
    constants: set[fx.Node] = set()
    for node in nodes:
        sources = [source for source in node.all_input_nodes if not facts(source).is_size]
        is_constant = all(source in constants or _is_constant_attribute(source, training) for source in sources)
        if is_constant and not (training and node.op == "call_module") and not _has_effects(node):
            constants.add(node)
    return constants


def _has_effects(node: fx.Node) -> bool:
    return bool(facts(node).mutates) or facts(node).draws


def _is_constant_attribute(node: fx.Node, training: bool) -> bool:
    value = value_of(node)
    return node.op == "get_attr" and not (training and isinstance(value, torch.Tensor) and value.requires_grad)


def _equal(old: fx.Node, new: fx.Node, same: dict[fx.Node, fx.Node]) -> bool:
    """Return whether two nodes make the same call; `same` maps nodes of the second call to those of the first."""
    if (old.op, old.target) != (new.op, new.target):
        return False
    inputs = ([one for one in node.all_input_nodes if _number(one) is one] for node in (new, old))
    sources = zip(*inputs, strict=False)
    made = {one: other for one, other in sources if one is not other and _is_made_again(other, one)}
    arguments = fx.node.map_arg(
        (new.args, new.kwargs), lambda source: _number(same.get(source, made.get(source, source)))
    )
    return repr(arguments) == repr(fx.node.map_arg((old.args, old.kwargs), _number))


def _number(source: fx.Node) -> Any:
    """Return the number of a size that the model has fixed by a branch on it, by which a second call has the number; else the node."""
    size = value_of(source) if facts(source).is_size else None
    expression = expression_of(size) if isinstance(size, torch.SymInt) else None
    return source if expression is None or not expression.is_number else int(expression)


def _is_made_again(old: fx.Node, new: fx.Node) -> bool:
    """Return whether two attributes of the graph are one value that each call makes: a number of numpy, a lambda, or a method that it looks up."""
    if not old.op == new.op == "get_attr":
        return False
    one, other = value_of(old), value_of(new)
    if isinstance(one, HeldObject) and isinstance(other, HeldObject):
        return _made_alike(one.value, other.value)
    return is_same(one, other) or (isinstance(one, (FunctionType, partial, *_METHODS)) and _alike(one, other))


def _made_alike(old: Any, new: Any) -> bool:
    """Return whether two objects, with all that they hold, are the same, but for what each call makes: its objects, tensors and sizes."""
    pending, seen = [(old, new)], set[int]()
    while pending:
        one, other = pending.pop()
        if one is other or id(one) in seen or _is_of_call(one, other) or _is_equal(one, other):
            continue
        seen.add(id(one))
        held, others = parts_of(one), parts_of(other)
        is_alike = type(one) is type(other) and getattr(one, "__code__", None) is getattr(other, "__code__", None)
        if not is_alike or len(held) != len(others) or not (held or is_state(one) or isinstance(one, _EMPTY)):
            return False
        pending += zip(held, others, strict=True)
    return True


def _alike(old: Any, new: Any) -> bool:
    """Return whether two values that functions hold are the same, but for tensors and sizes, which nodes of each call give functions."""
    if isinstance(old, FunctionType) and isinstance(new, FunctionType):
        held = zip(_held_by(old), _held_by(new), strict=False)
        return old.__code__ is new.__code__ and all(
            _is_of_call(one, other) or _alike(one, other) for one, other in held
        )
    if isinstance(old, partial) and isinstance(new, partial):  # no node gives it tensors
        parts = [(one.func, *one.args, *one.keywords, *one.keywords.values()) for one in (old, new)]
        is_plain = not any(tensor_cells(one) for one in parts[0])
        return is_plain and len(parts[0]) == len(parts[1]) and all(map(_alike, *parts))
    return old is new or _is_equal(old, new)


def _is_equal(old: Any, new: Any) -> bool:
    is_comparable = type(old) is type(new) and isinstance(old, (*_METHODS, int, float, str, bytes, type(None)))
    return is_comparable and bool(old == new)


_EMPTY = (FunctionType, CellType, tuple, frozenset)
_METHODS, _OF_CALLS = (MethodType, BuiltinMethodType), (torch.Tensor, torch.SymInt, torch.SymFloat)


def _is_of_call(old: Any, new: Any) -> bool:
    return isinstance(old, _OF_CALLS) and isinstance(new, _OF_CALLS) and type(old) is type(new)


def _held_by(function: FunctionType) -> list[Any]:
    """Return the values that a function closes over, and its defaults; for a variable that is not assigned yet, its cell."""
    held: list[Any] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:
            held.append(cell)
    return held
