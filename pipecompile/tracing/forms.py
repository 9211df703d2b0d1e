"""Values taken apart into leaves, deeper than pytree goes: objects of the user's own classes that hold tensors, too.

(ImageList(tensors=t, sizes=[(8, 8)]), {"a": u})   ──►   leaves [t, 8, 8, u] and the form that puts them back
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

__all__ = ["Form", "assembled", "is_object", "taken_apart"]

_FOREIGN = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "sympy"}
_DEEPEST = 6


@dataclass(frozen=True, slots=True)
class Form:
    """How leaves are put together: a pytree, some of whose leaves are objects."""

    spec: pytree.TreeSpec
    objects: tuple[ObjectForm, ...] = ()

    def put_together(self, leaves: Sequence[Any]) -> Any:
        """The value again; objects are new ones of the same class."""
        waiting = list(reversed(leaves))
        known = {each.place: each for each in self.objects}
        flat = [
            known[place].put_together([waiting.pop() for _ in range(known[place].count)])
            if place in known
            else waiting.pop()
            for place in range(self.spec.num_leaves)
        ]
        return pytree.tree_unflatten(flat, self.spec)


@dataclass(frozen=True, slots=True)
class ObjectForm:
    """The object at one leaf of a pytree: its class, the names of its attributes, and the `count` leaves in them."""

    place: int
    kind: type
    names: tuple[str, ...]
    form: Form
    count: int

    def put_together(self, leaves: Sequence[Any]) -> Any:
        return assembled(self.kind, dict(zip(self.names, self.form.put_together(leaves), strict=True)))


def assembled(kind: type, attributes: dict[str, Any]) -> Any:
    """An object of a class with these attributes; its `__init__` is not run."""
    made: Any = object.__new__(kind)
    vars(made).update(attributes)
    return made


def taken_apart(value: Any) -> tuple[list[Any], Form]:
    """The leaves of a value, in order, and its form."""
    flat, spec = pytree.tree_flatten(value)
    leaves: list[Any] = []
    objects = []
    for place, leaf in enumerate(flat):
        if not is_object(leaf):
            leaves.append(leaf)
            continue
        inner, form = taken_apart(tuple(vars(leaf).values()))
        objects.append(ObjectForm(place, type(leaf), tuple(vars(leaf)), form, len(inner)))
        leaves += inner
    return leaves, Form(spec, tuple(objects))


def is_object(value: object, depth: int = _DEEPEST) -> bool:
    """Is it an instance of somebody's own class with tensors among its attributes, however deep?"""
    if isinstance(value, (torch.Tensor, nn.Module, type, FunctionType, MethodType)) or not hasattr(value, "__dict__"):
        return False
    if type(value).__module__.partition(".")[0] in _FOREIGN or not depth:
        return False
    return any(isinstance(leaf, torch.Tensor) or is_object(leaf, depth - 1) for leaf in _attributes(value))


def _attributes(value: object) -> Iterator[Any]:
    return iter(pytree.tree_leaves(tuple(vars(value).values())))
