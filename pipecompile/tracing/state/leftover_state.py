"""What a call leaves on the model besides its output: written down when no other call reads it, else refused.

    self.latest = h              ──►   keep(h)              the last micro-batch's stays, as in a plain loop
    self.seen.append(h)          ──►   extend(h)
    self.heads[0] = h            ──►   keep(h)
    self.calls += 1              ──►   advance()
    h * self.scale_of_last_call  ──►   PC114                or, in a submodule, that one is kept whole

Whether it is read is found out by a second call in the state that the first one left: it must be recorded alike. Tables
that do not depend on the inputs are the exception: they may be made once, because making them anew gives the same. So may
in evaluation mode what depends on parameters alone, such as the position biases of an attention that are looked up once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from pipecompile.torch_private import pytree
from pipecompile.torch_private.modes import active_fake_mode
from pipecompile.torch_private.modules import GLOBAL_FORWARD_HOOKS, STATE_TABLES, forward_hooks_of
from pipecompile.tracing.emit.value_nodes import PLAIN
from pipecompile.tracing.node_facts import facts, value_of
from pipecompile.tracing.recompute_flag import is_recomputing
from pipecompile.tracing.state.snapshot import Place, content_of, places_of

__all__ = ["Change", "Watch", "alike", "from_constants", "hooks_of", "marks", "muted", "without", "writer"]

_muted = False


@contextmanager
def muted() -> Iterator[None]:
    """Nothing is left on the model while the block lasts: its nodes are only measured."""
    global _muted  # noqa: PLW0603 as thread-local state would be: measuring is done by one thread, before anything runs
    before, _muted = _muted, True
    try:
        yield
    finally:
        _muted = before


@dataclass(frozen=True, slots=True)
class Change:
    """At `key` of a container (None: at the end of a list) a call put `value`."""

    place: Place
    key: Any
    before: Any
    value: Any

    @property
    def name(self) -> str:
        where = (self.place.owner, self.place.name, "" if self.key is None else str(self.key))
        return ".".join(filter(None, where)) or "a list"

    @property
    def leaves(self) -> list[Any]:
        return pytree.tree_leaves(self.value)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    @property
    def is_count(self) -> bool:
        """A number that was another number before."""
        return all(type(value) in (int, float) for value in (self.before, self.value))

    @property
    def is_plain(self) -> bool:
        """Nothing but tensors, numbers and text, in containers that a graph can write."""
        kinds = (torch.Tensor, torch.SymInt, torch.SymFloat, *PLAIN)
        return all(isinstance(leaf, kinds) for leaf in self.leaves)


class Watch:
    """Knows what was where when it was made: on a model, or in what functions close over."""

    def __init__(self, *roots: Any) -> None:
        modules = [module for root in roots if isinstance(root, nn.Module) for module in root.modules()]
        self._tables = {id(vars(module).get(name)) for module in modules for name in STATE_TABLES}
        self._tables |= {id(vars(module)) for module in modules if type(module).__module__.startswith("torch.nn.")}
        self._then = [(place, content_of(place.container)) for place in places_of(*roots)]

    @property
    def lengths(self) -> frozenset[int]:
        """The containers, by identity, whose length can be asked for."""
        places = (place.container for place, _ in self._then)
        return frozenset(id(container) for container in places if isinstance(container, (list, dict, deque, set)))

    def changes(self) -> list[Change]:
        """What is otherwise now. Replaced buffers are no business of ours, nor is what layers of torch keep."""
        places = [(place, then) for place, then in self._then if id(place.container) not in self._tables]
        return [change for place, then in places for change in _between(place, then)]


def hooks_of(module: nn.Module) -> list[Any]:
    """What a call of this module runs beside its forward."""
    tables = (*forward_hooks_of(module), *GLOBAL_FORWARD_HOOKS)
    return [hook for table in tables for hook in table.values()]


def marks(changes: Sequence[Change]) -> set[tuple[int, Any]]:
    """Where these changes are, so that they are known again among more."""
    return {(id(c.place.container), key) for c in changes for key in (map(id, c.value) if c.key is None else (c.key,))}


def without(changes: Sequence[Change], known: set[tuple[int, Any]]) -> list[Change]:
    """Less what a module kept whole did, with its hooks: that happens whenever it runs."""
    found = []
    for change in changes:
        where = id(change.place.container)
        if change.key is None:
            value = [item for item in change.value if (where, id(item)) not in known]
            found += [replace(change, value=value)] if value else []
        elif (where, change.key) not in known:
            found.append(change)
    return found


def _between(place: Place, then: Sequence[Any]) -> Iterator[Change]:
    now = content_of(place.container)
    if isinstance(place.container, deque):
        if added := _added(then, now):
            yield Change(place, None, None, added)
    elif isinstance(place.container, list):
        yield from _in_list(place, then, now)
    elif isinstance(place.container, set):
        if len(now) != len(then) or any(item not in place.container for item in then):
            yield Change(place, None, None, [_ELSEWISE])
    else:
        before = dict(then)
        yield from (
            Change(place, key, before.get(key), value)
            for key, value in now
            if not (key in before and _unchanged(before[key], value))
        )


_ELSEWISE = object()
"""In the place of a change that no node can make."""


def _in_list(place: Place, then: Sequence[Any], now: Sequence[Any]) -> Iterator[Change]:
    """Items that were replaced and items that were added; nothing else is known to be done to a list."""
    replaced = [index for index, (a, b) in enumerate(zip(then, now, strict=False)) if not _unchanged(a, b)]
    known = {id(item) for item in then if isinstance(item, torch.Tensor)}
    if len(now) < len(then) or any(id(now[index]) in known for index in replaced):
        yield Change(place, None, None, [_ELSEWISE])
        return
    yield from (Change(place, index, then[index], now[index]) for index in replaced)
    if added := list(now[len(then) :]):
        yield Change(place, None, None, added)


def _added(then: Sequence[Any], now: Sequence[Any]) -> list[Any]:
    """What is new at the end of a deque, less what it dropped at its beginning."""
    for gone in range(len(then) + 1):
        stayed = then[gone:]
        if len(stayed) <= len(now) and all(a is b for a, b in zip(stayed, now, strict=False)):
            return list(now[len(stayed) :])
    return []


def _unchanged(before: Any, value: Any) -> bool:
    return before is value or (type(before) is type(value) and isinstance(value, PLAIN) and before == value)


def writer(change: Change, later: Any) -> Any:
    """The function of a node that makes this change at every run; `later` is what a second call left. None: nobody can."""
    container, key = change.place.container, change.key
    if change.is_count and type(later) in (int, float):
        step = change.value - change.before
        if later - change.value != step:
            return None
        return _named("advance", lambda: _put(container, key, _at(container, key) + step))
    if not change.is_plain:
        return None
    if key is None:
        return _named("extend", container.extend)
    return _named("keep", lambda value: _put(container, key, value))


def _at(container: Any, key: Any) -> Any:
    return container[key] if isinstance(container, (dict, list)) else container.cell_contents


def _put(container: Any, key: Any, value: Any) -> None:
    if isinstance(container, (dict, list)):
        container[key] = value
    else:
        container.cell_contents = value


def _named(name: str, act: Any) -> Any:
    def write(*values: Any) -> None:
        if not _muted and active_fake_mode() is None and not is_recomputing():
            act(*values)

    write.__name__ = write.__qualname__ = name
    return write


def alike(first: Sequence[fx.Node], second: Sequence[fx.Node], free: set[fx.Node]) -> bool:
    """Is the second call recorded as the first was? It may leave out the `free` ones, and use them from the first."""
    same: dict[fx.Node, fx.Node] = {}
    left = iter(first)
    for node in second:
        found = next((old for old in left if old not in free or _equal(old, node, same)), None)
        if found is None or not _equal(found, node, same):
            return False
        same[node] = found
    used = {source for node in second for source in node.all_input_nodes if source in set(first)}
    return used <= free and all(old in free for old in left)


def from_constants(nodes: Sequence[fx.Node], *, training: bool) -> set[fx.Node]:
    """What is computed from constants alone, writes nothing and draws nothing. Parameters are constants unless training."""
    free: set[fx.Node] = set()
    for node in nodes:
        sources = [source for source in node.all_input_nodes if not facts(source).is_size]
        alone = all(source in free or _constant(source, training) for source in sources)
        if alone and not (training and node.op == "call_module") and not _acts(node):
            free.add(node)
    return free


def _acts(node: fx.Node) -> bool:
    return bool(facts(node).mutates) or facts(node).draws


def _constant(node: fx.Node, training: bool) -> bool:
    value = value_of(node)
    return node.op == "get_attr" and not (training and isinstance(value, torch.Tensor) and value.requires_grad)


def _equal(old: fx.Node, new: fx.Node, same: dict[fx.Node, fx.Node]) -> bool:
    if (old.op, old.target) != (new.op, new.target):
        return False
    given = fx.node.map_arg((new.args, new.kwargs), lambda source: same.get(source, source))
    return repr(given) == repr((old.args, old.kwargs))
