"""State that a call leaves on the model besides its output: each change becomes a node (`effect_nodes`), or recording is refused.

A second call, in the state that the first call left, decides whether the state is read: both calls must be recorded alike
(`second_call`). Exceptions are tables that do not depend on the inputs: a call may compute them only if they are missing,
because computing them again gives the same. In evaluation mode this includes tables computed from parameters, such as the
position biases of an attention that are looked up once.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pipecompile.batching.containers import flatten_containers, has_attributes
from pipecompile.torch_private import pytree
from pipecompile.torch_private.modules import (
    BUFFER_TABLE,
    GLOBAL_FORWARD_HOOKS,
    HOOK_TABLES,
    STATE_TABLES,
    forward_hooks_of,
)
from pipecompile.tracing.emit.value_nodes import PLAIN
from pipecompile.tracing.emit.written_back import is_written_back
from pipecompile.tracing.fakes.lifted_numbers import LiftedNumber
from pipecompile.tracing.state.snapshot import Place, content_of, places_of

__all__ = [
    "StateChange",
    "StateWatch",
    "change_keys",
    "hooks_of",
    "settled",
    "with_whole_lists",
    "without_keys",
]


@dataclass(frozen=True, slots=True)
class StateChange:
    """A call put `value` at `key` of a container, where `before` was. With key None, `value` lists items appended; if `is_whole`, all
    items of a list that the call has emptied before.
    """

    place: Place
    key: Any
    before: Any
    value: Any
    is_whole: bool = False

    @property
    def name(self) -> str:
        """The path by which the user's code reaches the container, for messages."""
        inside = "" if self.place.name in STATE_TABLES else self.place.name
        key = (
            "" if self.key is None or self.place.name in HOOK_TABLES else str(self.key)
        )  # the id of a hook is another each time
        where = (self.place.owner, inside, key)
        return ".".join(filter(None, where)) or "a list"

    @property
    def leaves(self) -> list[Any]:
        return flatten_containers(self.value)[0]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    @property
    def is_removal(self) -> bool:
        """Whether the container has lost items, or has them in another order."""
        return any(one is _UNWRITABLE for one in (self.value, *(self.value if self.key is None else ())))

    def settled(self) -> StateChange:
        """Return the change with copies of the containers of its value."""
        return replace(self, value=settled(self.value))

    @property
    def is_buffer(self) -> bool:
        """Whether the container is a module's table of buffers."""
        return self.place.name == BUFFER_TABLE

    def is_at(self, other: StateChange) -> bool:
        """Return whether another change is of the same key of the same container."""
        return other.place.container is self.place.container and other.key == self.key

    @property
    def is_count(self) -> bool:
        """Whether a number replaced a number."""
        return all(type(value) in (int, float) for value in (self.before, self.value))

    @property
    def is_first_number(self) -> bool:
        """Whether a number is the first one at a key: a counter that the first call begins, or a number that it computes once."""
        return self.before is None and self.key is not None and type(self.value) in (int, float)

    @property
    def is_sum_of_sizes(self) -> bool:
        """Whether a number that depends on the size of the batch replaced a number, or is the first one at a key."""
        is_size = isinstance(self.value, (torch.SymInt, torch.SymFloat)) and not isinstance(self.value, LiftedNumber)
        return is_size and self.key is not None and (self.before is None or type(self.before) in (int, float))

    @property
    def is_number(self) -> bool:
        """Whether the change may be an advance of a counter."""
        return self.is_count or self.is_first_number or self.is_sum_of_sizes

    @property
    def is_plain(self) -> bool:
        """Whether the value is made of tensors, numbers and texts in containers that a graph can write."""
        kinds = (torch.Tensor, torch.SymInt, torch.SymFloat, *PLAIN)
        return all(isinstance(leaf, kinds) for leaf in self.leaves)


class StateWatch:
    """The contents of all containers reachable from the roots (models, hooks) at the time of construction.

    `kept` are keys of buffers that are no longer written back (`change_keys`): an earlier call replaced them by another shape.
    """

    def __init__(self, *roots: Any, kept: AbstractSet[tuple[int, Any]] = frozenset()) -> None:
        self._kept, self._roots = kept, roots
        modules = [module for root in roots if isinstance(root, nn.Module) for module in root.modules()]
        self._tables = {
            id(vars(module).get(name)) for module in modules for name in STATE_TABLES if name != BUFFER_TABLE
        }
        self._layers = {id(vars(module)) for module in modules if type(module).__module__.startswith("torch.nn.")}
        self._then = [(place, content_of(place.container)) for place in places_of(*roots)]

    @property
    def lengths(self) -> frozenset[int]:
        """The ids of the containers that have a length."""
        places = (place.container for place, _ in self._then)
        return frozenset(id(container) for container in places if isinstance(container, (list, dict, deque, set)))

    def changes(self) -> list[StateChange]:
        """Return what differs now in containers that are still reachable. Parameters, children and buffers of the same shape and dtype are
        left out: such buffers are written back.
        """
        places = [(place, then) for place, then in self._then if id(place.container) not in self._tables]
        changes = [change for place, then in places for change in _differences(place, then)]
        changes = [change for change in changes if not (change.is_buffer and self._is_written_back(change))]
        changes = [change for change in changes if not self._is_layers_own(change)]
        reached = {id(place.container) for place in places_of(*self._roots)} if changes else set()
        return [change for change in changes if id(change.place.container) in reached]

    def changed(self, names: AbstractSet[str]) -> Iterator[StateChange]:
        """Yield what differs now at these names of attributes, buffers and dicts."""
        for place, then in self._then:
            is_named = isinstance(place.container, dict) and not names.isdisjoint(place.container)
            if is_named and id(place.container) not in self._tables:
                yield from (change for change in _differences(place, then) if change.key in names)

    def replaced(self) -> list[StateChange]:
        """Return the parameters and children that are others now. No node can replace them."""
        places = [(place, then) for place, then in self._then if id(place.container) in self._tables]
        return [change for place, then in places for change in _differences(place, then)]

    def _is_layers_own(self, change: StateChange) -> bool:
        """Return whether a layer of torch has changed an attribute of its own, as LSTM the list of its weights: its node does so too."""
        return id(change.place.container) in self._layers and str(change.key).startswith("_")

    def _is_written_back(self, change: StateChange) -> bool:
        kept = (id(change.place.container), change.key) in self._kept
        return not kept and is_written_back(change.before, change.value)


def settled(value: Any) -> Any:
    """Return the value with copies of its containers, which a later call may fill or empty."""
    return pytree.tree_map(lambda one: one, value, is_leaf=has_attributes)


def hooks_of(module: nn.Module) -> list[Any]:
    """Return the hooks that a call of this module runs around its forward."""
    tables = (*forward_hooks_of(module), *GLOBAL_FORWARD_HOOKS)
    return [hook for table in tables for hook in table.values()]


def change_keys(changes: Sequence[StateChange]) -> set[tuple[int, Any]]:
    """Return (container, key) of each change, or (container, item) of each item appended."""
    return {(id(c.place.container), key) for c in changes for key in (map(id, c.value) if c.key is None else (c.key,))}


def with_whole_lists(
    changes: Sequence[StateChange], later: Sequence[StateChange]
) -> tuple[list[StateChange], list[StateChange]]:
    """Return the changes of two calls, in which a list that each call empties and fills again is one change, of all items.

    The first call has appended n items to an empty list, and the second has replaced all n items.
    """
    whole = {}
    for change in changes:
        replaced = [one for one in later if one.place.container is change.place.container]
        keys = [one.key for one in replaced]
        if type(change.place.container) is list and change.key is None and keys == [*range(len(change.value))]:
            whole[id(change.place.container)] = replace(change, value=[one.value for one in replaced], is_whole=True)
    firsts = [replace(one, is_whole=True) if id(one.place.container) in whole else one for one in changes]
    return firsts, [one for one in later if id(one.place.container) not in whole] + [*whole.values()]


def without_keys(changes: Sequence[StateChange], known: set[tuple[int, Any]]) -> list[StateChange]:
    """Return the changes without those whose keys are `known`."""
    remaining = []
    for change in changes:
        container = id(change.place.container)
        if change.key is None:
            value = [item for item in change.value if (container, id(item)) not in known]
            remaining += [replace(change, value=value)] if value else []
        elif (container, change.key) not in known:
            remaining.append(change)
    return remaining


def _differences(place: Place, then: Sequence[Any]) -> Iterator[StateChange]:
    """Yield the changes of a container whose content was `then`."""
    now = content_of(place.container)
    if isinstance(place.container, deque):
        if added := _added(then, now):
            yield StateChange(place, None, None, added)
    elif isinstance(place.container, list):
        yield from _list_differences(place, then, now)
    elif isinstance(place.container, set):
        yield from _set_differences(place, then)
    else:
        before = dict(then)
        if key := _lost_or_moved(place.container, then, now):
            yield StateChange(place, key[0], None, _UNWRITABLE)
        yield from (
            StateChange(place, key, before.get(key), value)
            for key, value in now
            if not (key in before and _unchanged(before[key], value))
        )


def _lost_or_moved(container: Any, then: Sequence[Any], now: Sequence[Any]) -> list[Any]:
    """Return keys that a mapping has lost, or if an OrderedDict has another order, its keys."""
    before, after = dict(then), dict(now)
    lost = [key for key in before if key not in after]
    is_moved = isinstance(container, OrderedDict) and [key for key, _ in now if key in before] != [*before]
    return lost or ([*before] if is_moved else [])


_UNWRITABLE = object()
"""The value of a change that no node can make."""


def _set_differences(place: Place, then: Sequence[Any]) -> Iterator[StateChange]:
    """Yield plain items added to a set; an unwritable change if it lost items or holds others."""
    added = sorted(place.container.difference(then), key=repr)  # each process has the same order
    if not place.container.issuperset(then) or not all(isinstance(item, PLAIN) for item in added):
        yield StateChange(place, None, None, [_UNWRITABLE])
    elif added:
        yield StateChange(place, None, None, added)


def _list_differences(place: Place, then: Sequence[Any], now: Sequence[Any]) -> Iterator[StateChange]:
    """Yield items replaced and items appended; an unwritable change if the list lost items or shifted them."""
    replaced = [index for index, (a, b) in enumerate(zip(then, now, strict=False)) if not _unchanged(a, b)]
    known = {id(item) for item in then if isinstance(item, torch.Tensor)}
    if len(now) < len(then) or any(id(now[index]) in known for index in replaced):
        yield StateChange(place, None, None, [_UNWRITABLE])
        return
    yield from (StateChange(place, index, then[index], now[index]) for index in replaced)
    if added := list(now[len(then) :]):
        yield StateChange(place, None, None, added)


def _added(then: Sequence[Any], now: Sequence[Any]) -> list[Any]:
    """Return the items appended to a deque, which may have dropped items at its beginning."""
    for n_dropped in range(len(then) + 1):
        stayed = then[n_dropped:]
        if len(stayed) <= len(now) and all(a is b for a, b in zip(stayed, now, strict=False)):
            return list(now[len(stayed) :])
    return []


def _unchanged(before: Any, value: Any) -> bool:
    return before is value or (type(before) is type(value) and isinstance(value, PLAIN) and before == value)
