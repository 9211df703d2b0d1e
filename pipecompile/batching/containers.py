"""Objects that hold tensors, taken apart like tuples and dicts: dataclasses, caches, subclasses of dict, anything with attributes.

    opened(value)  ──►  value with a Shell in the place of every such object; a Shell is a pytree node, so
    leaves, spec = taken_apart(value)  gives its tensors, and  pytree.tree_unflatten(leaves, spec)  makes the object anew

Nothing is registered for the user's classes; an object that holds no tensor stays a leaf.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from pipecompile.torch_private import pytree
from pipecompile.torch_private.fx_graphs import register_pytree_flatten_spec

__all__ = ["Shell", "bare", "built", "hides_tensors", "opened", "shell_of", "taken_apart"]

_CONTENT = (dict, list, tuple, set, deque)
_CLOSED = (torch.Tensor, nn.Module, type, ModuleType, FunctionType, str, bytes, int, float, complex, torch.Generator,
           torch.dtype, torch.device, torch.Size, torch.SymInt, torch.SymFloat, torch.SymBool, type(None), torch.nn.utils.rnn.PackedSequence)  # fmt: skip
_SEARCHED = 2000


@dataclass(frozen=True, slots=True)
class Look:
    """What is left of an object without its values: its class, and how each value is held."""

    kind: type
    content: type | None
    keys: tuple[Any, ...]
    attributes: tuple[str, ...]

    def build(self, values: Sequence[Any]) -> Any:
        count = len(values) - len(self.attributes)
        made = self._filled(values[:count])
        for name, value in zip(self.attributes, values[count:], strict=True):
            object.__setattr__(made, name, value)
        return made

    def _filled(self, items: Sequence[Any]) -> Any:
        if self.content is None:
            own: Any = self.kind.__new__
            return object.__new__(self.kind) if isinstance(own, FunctionType) else own(self.kind)
        if self.content is tuple:
            return tuple.__new__(self.kind, items)
        content: Any = self.content
        made = content.__new__(self.kind)
        if self.content is dict:
            for key, item in zip(self.keys, items, strict=True):
                dict.__setitem__(made, key, item)
        else:
            set.update(made, items) if content is set else content.extend(made, items)
        return made


@dataclass(frozen=True, slots=True)
class Shell:
    """An object taken apart."""

    look: Look
    values: tuple[Any, ...] = field(repr=False)


def taken_apart(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of a value, in order, and how they are put together."""
    leaves, spec = pytree.tree_flatten(value)
    if not any(_openable(leaf) and _holds_tensors(leaf) for leaf in leaves):
        return leaves, spec
    return pytree.tree_flatten(opened(value))


def opened(value: Any) -> Any:
    """`value` with shells in the place of objects that hold tensors. Everything else in it stays as it is."""
    leaves, spec = pytree.tree_flatten(value)
    if not any(_openable(leaf) and _holds_tensors(leaf) for leaf in leaves):
        return value
    return pytree.tree_unflatten([_opened_leaf(leaf, ()) for leaf in leaves], spec)


def _opened_leaf(value: Any, around: tuple[int, ...]) -> Any:
    if not _openable(value) or id(value) in around or not _holds_tensors(value):
        return value
    look, values = _taken_apart(value)
    return Shell(look, tuple(pytree.tree_map(partial(_opened_leaf, around=(*around, id(value))), values)))


def shell_of(value: Any) -> Shell | None:
    """An object that holds tensors, its own values left as they are; None for a plain container and for all else."""
    return None if type(value) in _CONTENT or not _openable(value) or not _holds_tensors(value) else bare(value)


def bare(value: Any) -> Shell:
    """The shell of whatever it is."""
    look, values = _taken_apart(value)
    return Shell(look, tuple(values))


def built(look: Look, values: Sequence[Any]) -> Any:
    """An object that looks like this; its `__init__` is not run."""
    return look.build(values)


def _openable(value: Any) -> bool:
    return not isinstance(value, _CLOSED) and (isinstance(value, _CONTENT) or bool(_attributes(value)))


def _holds_tensors(value: Any) -> bool:
    """Looks at everything inside once, and gives up on what is too large to be anything but the program itself."""
    waiting, seen = [value], {id(value)}
    while waiting and len(seen) < _SEARCHED:
        found = waiting.pop()
        if isinstance(found, torch.Tensor):
            return True
        inner = pytree.tree_leaves(_taken_apart(found)[1]) if _openable(found) else []
        new = {id(leaf): leaf for leaf in inner if id(leaf) not in seen}
        seen.update(new)
        waiting += new.values()
    return False


def _taken_apart(value: Any) -> tuple[Look, list[Any]]:
    content = next((kind for kind in _CONTENT if isinstance(value, kind)), None)
    keys = tuple(value) if content is dict else tuple(range(len(value))) if content is not None else ()
    items = list(dict.values(value)) if content is dict else list(value) if content is not None else []
    names = tuple(_attributes(value))
    return Look(type(value), content, keys, names), [*items, *(getattr(value, name) for name in names)]


def _attributes(value: Any) -> list[str]:
    """The names under which an object holds values: in its `__dict__` and in slots."""
    slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
    return [*getattr(value, "__dict__", ()), *(name for name in slots if hasattr(value, name))]


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    hidden = [f"_{kind.__name__.lstrip('_')}{n}" if n.startswith("__") and not n.endswith("__") else n for n in names]
    return tuple(name for name in hidden if name not in ("__dict__", "__weakref__"))


def hides_tensors(value: Any) -> bool:
    """Can tensors be reached from this leaf, which nobody can take apart: an iterator, a closure, an object of C?"""
    waiting, seen = [value], {id(value)}
    while waiting and len(seen) < _SEARCHED:
        found = waiting.pop()
        if isinstance(found, torch.Tensor):
            return True
        if isinstance(found, (nn.Module, type, ModuleType)):
            continue
        held = (
            [*(found.__closure__ or ()), found.__defaults__]
            if isinstance(found, FunctionType)
            else gc.get_referents(found)
        )
        new = [thing for thing in held if id(thing) not in seen]
        seen.update(map(id, new))
        waiting += new
    return False


def _flatten(value: Any) -> tuple[list[Any], Look]:
    """Of a shell; or of an object itself, where somebody knows from elsewhere that it is to be one."""
    if isinstance(value, Shell):
        return list(value.values), value.look
    look, values = _taken_apart(value)
    return values, look


def _flatten_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], Look]:
    values, look = _flatten(value)
    names = [*(pytree.MappingKey(key) for key in look.keys), *map(pytree.GetAttrKey, look.attributes)]
    return list(zip(names, values, strict=True)), look


pytree.register_pytree_node(
    Shell,
    _flatten,
    lambda values, look: look.build(list(values)),
    serialized_type_name="pipecompile.Shell",
    flatten_with_keys_fn=_flatten_with_keys,
)
register_pytree_flatten_spec(Shell, lambda value, _spec: _flatten(value)[0])
