"""The functions of the nodes that make the changes which a call leaves on the model.

self.latest = h              ──►   keep(h)              the last micro-batch's remains, as in a plain loop
self.seen.append(h)          ──►   extend(h)            of a set too, which has an item once
self.heads[0] = h            ──►   keep(h)
self.seen.clear(), append    ──►   keep([h])            all items of a list that each call empties first
self.calls += 1              ──►   advance()            where no number is yet, what the first call left
self.seen += len(x)          ──►   advance(s, s)        the step of this micro-batch, and what the first call left
self.table = grid(n)         ──►   keep(table)          a buffer of another shape, dtype or None; others are written back
self.log.append(self.calls)                             no node: each call leaves another number
h * self.scale_of_last_call  ──►   PC114                in a submodule: an opaque call
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from threading import RLock, local
from typing import Any

import torch
from torch import nn

from pipecompile.batching.containers import flatten_containers
from pipecompile.torch_private.modes import active_fake_mode
from pipecompile.tracing.fakes.batch_symbol import is_same_size
from pipecompile.tracing.state.container_routes import ContainerRoute
from pipecompile.tracing.state.effect_places import EffectPlace
from pipecompile.tracing.state.left_values import is_equal_leaf
from pipecompile.tracing.state.leftover_state import StateChange

__all__ = ["EffectNote", "effect_function", "effects_muted", "effects_noted", "in_turn"]

_muted = False


@contextmanager
def effects_muted() -> Iterator[None]:
    """Let effect nodes do nothing inside the block, because the nodes are only measured."""
    global _muted  # noqa: PLW0603 not thread-local: one thread measures, before any stage runs
    before, _muted = _muted, True
    try:
        yield
    finally:
        _muted = before


@dataclass(frozen=True, slots=True)
class EffectNote:
    """A change that an effect node has made: the `value` that it has left (`is_whole`: of all items of a list), and of a count, the number
    `after` it.
    """

    value: Any
    after: Any
    is_whole: bool


class _Noting(local):
    """The notes of this thread, by the id of the place; None where none are taken."""

    notes: dict[int, list[EffectNote]] | None = None


_noting = _Noting()


@contextmanager
def effects_noted() -> Iterator[dict[int, list[EffectNote]]]:
    """Note the changes that effect nodes of this thread make inside the block, in order, by the id of their place."""
    before, _noting.notes = _noting.notes, {}
    try:
        yield _noting.notes
    finally:
        _noting.notes = before


def effect_function(change: StateChange, later: Any, owner: nn.Module) -> Any:
    """Return the function of a node that makes this change of a container of `owner` at every run, or None if no node can.

    `later` is the value that the second call left at the same key. The names of these functions are part of saved plans.
    """
    key, route = _plain_key(change.key), ContainerRoute.to(change.place.container, owner, change.place.name)
    is_attribute = change.place.container is vars(owner) and not isinstance(change.value, (list, dict, deque))
    place = EffectPlace(route, key, is_attribute=is_attribute)
    if change.is_number and type(later) in (int, float) and later != change.value:
        step = later - change.value
        if change.before is not None and change.value - change.before != step:
            return None
        place = replace(place, is_count=True)
        return _effect("advance", place, partial(place.advance, step, change.value))
    if change.is_sum_of_sizes and isinstance(later, (torch.SymInt, torch.SymFloat)):
        if change.before is not None and not is_same_size(later - change.value, change.value - change.before):
            return None
        place = replace(place, is_count=True)
        return _effect("advance", place, place.advance, (later - change.value, change.value))
    if not change.is_plain or not _is_repeated(change, later):
        return None
    is_kept = key is not None or change.is_whole
    return _effect("keep", place, place.put) if is_kept else _effect("extend", place, place.extend)


def _plain_key(key: Any) -> Any:
    """Return a key with numbers for sizes of the recording, which hashing has decided: `self.cache[len(x)]`."""
    if type(key) is tuple:
        return tuple(map(_plain_key, key))
    return int(key) if isinstance(key, torch.SymInt) else key


def in_turn(effect: Any, turns: RLock | None) -> Any:
    """Return the function of a node that holds `turns` while it makes a change."""
    if turns is None:
        return effect

    def write(*values: Any) -> None:
        with turns:
            effect(*values)

    write.__name__ = write.__qualname__ = effect.__name__
    write.place = effect.place  # type: ignore[attr-defined]
    return write


def _is_repeated(change: StateChange, later: Any) -> bool:
    """Return whether the second call left what a node leaves at every run: a list gets items again, a set those that it has."""
    if later is None:
        return change.key is not None or isinstance(change.place.container, set)
    if change.key is None and isinstance(change.place.container, set):
        return False
    (leaves, structure), (others, found) = flatten_containers(change.value), flatten_containers(later)
    return structure == found and all(map(is_equal_leaf, leaves, others))


def _effect(name: str, place: EffectPlace, act: Any, sizes: tuple[Any, ...] = ()) -> Any:
    """Return `act` as a function of this name with its `place`, which does nothing while muted and on fake tensors. `sizes` are what the
    node of a counter takes.
    """

    def write(*values: Any) -> None:
        if not _muted and active_fake_mode() is None:
            act(*values)
            if _noting.notes is not None:
                value, after = values[0] if values else None, place.now() if place.is_count else None
                _noting.notes.setdefault(id(place), []).append(EffectNote(value, after, name == "keep"))

    write.__name__ = write.__qualname__ = name
    write.place = place  # type: ignore[attr-defined]
    write.sizes = sizes  # type: ignore[attr-defined]
    return write
