"""Layouts of objects: the class of an object, and where each value in it belongs.

    output = Output(loss=t)                     a dictionary, with an attribute per field
    output["logits"] = u
    values      t, u, None
    keys        loss, logits                    values 0 and 1
    attributes  loss, logits, note              values 0, 1 and 2

An object that is built of a layout has items and attributes in the order of the first object. Its `__init__` does not run.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

__all__ = ["BUILTIN_CONTAINERS", "ObjectLayout", "attributes_of", "layout_and_values"]

BUILTIN_CONTAINERS = (OrderedDict, defaultdict, dict, list, tuple, set, frozenset, deque)
_HIDDEN_ATTRIBUTES: dict[type, tuple[str, ...]] = {defaultdict: ("default_factory",), deque: ("maxlen",)}
"""Attributes of built-in containers that no slot names; torch's own pytree knows them of the containers themselves."""
_PLAIN = (int, float, complex, str, bytes, type(None))


@dataclass(frozen=True, slots=True)
class ObjectLayout:
    """An object without its values: its class, the built-in container that it derives from, and where each value belongs.

    Values are ordered: items of the container (under `keys`), then attributes. An attribute that is one of the items has no value of
    its own. `places` has the position of each attribute's value.
    """

    kind: type
    content: type | None
    keys: tuple[Any, ...]
    attributes: tuple[str, ...]
    places: tuple[int, ...]

    @property
    def own_attributes(self) -> tuple[str, ...]:
        """The attributes that have values of their own, in the order of the values."""
        pairs = zip(self.attributes, self.places, strict=True)
        return tuple(name for name, place in pairs if place >= len(self.keys))

    def build(self, values: Sequence[Any]) -> Any:
        """Return a new object of this layout, without running its `__init__`."""
        attributes = {name: values[place] for name, place in zip(self.attributes, self.places, strict=True)}
        longest = attributes.pop("maxlen", None) if self.content is deque else None
        instance = self._with_items(values[: len(self.keys)], longest)
        for name, value in attributes.items():
            object.__setattr__(instance, name, value)
        return instance

    def _with_items(self, items: Sequence[Any], longest: int | None) -> Any:
        """Return a new object with these items. `longest` is the maximal length of a deque."""
        if self.content is None:
            new: Any = self.kind.__new__
            return object.__new__(self.kind) if isinstance(new, FunctionType) else new(self.kind)
        content: Any = self.content
        if content in (tuple, frozenset):
            is_structseq = hasattr(self.kind, "n_sequence_fields")  # as torch.return_types.max
            return self.kind(items) if is_structseq else content.__new__(self.kind, items)
        instance = content.__new__(self.kind)
        if issubclass(content, dict):
            for key, item in zip(self.keys, items, strict=True):
                content.__setitem__(instance, key, item)
        elif content is deque:
            deque.__init__(instance, items, longest)
        else:
            content.update(instance, items) if content is set else content.extend(instance, items)
        return instance


def layout_and_values(value: Any) -> tuple[ObjectLayout, list[Any]]:
    """Return the layout of an object, and its values: items of its built-in container, then attributes."""
    content: Any = next((kind for kind in BUILTIN_CONTAINERS if isinstance(value, kind)), None)
    is_dict = content is not None and issubclass(content, dict)
    values = list(content.values(value)) if is_dict else list(value) if content is not None else []
    keys = tuple(content.keys(value)) if is_dict else tuple(range(len(values)))
    names, places = tuple(attributes_of(value)), list[int]()
    at = {id(item): place for place, item in enumerate(values) if not isinstance(item, _PLAIN)}
    for name in names:
        attribute = getattr(value, name)
        places.append(at.get(id(attribute), len(values)))
        if places[-1] == len(values):
            values.append(attribute)
    return ObjectLayout(type(value), content, keys, names, tuple(places)), values


def attributes_of(value: Any) -> list[str]:
    """Return the names of the attributes of an object: in its `__dict__`, in slots, and those of its built-in container."""
    slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
    return [*getattr(value, "__dict__", ()), *(name for name in slots if hasattr(value, name))]


def _slots(kind: type) -> tuple[str, ...]:
    """Return the slots of one class, private names as Python mangles them."""
    if kind in _HIDDEN_ATTRIBUTES:
        return _HIDDEN_ATTRIBUTES[kind]
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    hidden = [f"_{kind.__name__.lstrip('_')}{n}" if n.startswith("__") and not n.endswith("__") else n for n in names]
    return tuple(name for name in hidden if name not in ("__dict__", "__weakref__"))
