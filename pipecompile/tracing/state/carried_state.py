"""State in attributes and containers that a call reads before it replaces it: a graph writes it into tensors, or serves one call.

self.h = torch.tanh(self.cell(x) + self.h).detach()     `h` of the same shape: the graph writes its tensor in place, as a buffer's
if self.h is None: self.h = torch.zeros(...)            None before: a recording that serves one call; guards see the new tensor

Recordings learn of this state one by one: each failure names the changes that the next call depends on.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from pipecompile.errors import TraceError
from pipecompile.torch_private import pytree
from pipecompile.torch_private.modes import FakeTensor
from pipecompile.torch_private.storages import storage_key
from pipecompile.tracing.emit.value_nodes import PLAIN
from pipecompile.tracing.state.container_routes import ContainerRoute
from pipecompile.tracing.state.effect_places import EffectPlace
from pipecompile.tracing.state.leftover_state import StateChange

__all__ = [
    "CarriedFacts",
    "CarriedState",
    "Carrying",
    "carried_keys",
    "has_batch_size",
    "is_fixed_buffer",
    "is_plain_tensor",
]

Key = tuple[str, str, Any]
"""(path of the module, path of the container inside it, key): the same in every recording of a model."""


class Carrying(Enum):
    """The state that a graph may carry from call to call: none, tensors of one shape, or also others if each step is a single call."""

    NOTHING = 0
    TENSORS = 1
    SINGLE_CALLS = 2


@dataclass(frozen=True, slots=True)
class CarriedFacts:
    """The state that a graph carries from call to call: `places`, whose tensors it writes in place. With `is_single`, it serves one call alone, and
    leaves what the next recording begins with. `fault` is the error without such state, `names` are those of the attributes.
    """

    places: tuple[EffectPlace, ...]
    is_single: bool
    fault: TraceError
    names: tuple[str, ...] = ()

    def check_microbatches(self) -> None:
        """Raise TraceError if the graph serves one call alone: the second micro-batch begins with what the first has left."""
        if self.is_single:
            why = f"{self.fault.why}: the second micro-batch is another recording than the first"
            hint = "n_microbatches=1; or begin with a tensor of the shape that the forward leaves, such as zeros"
            raise TraceError(self.fault.what, code=self.fault.code, where=self.fault.where, why=why, hint=hint)


class CarriedState:
    """Facts that recordings of one model have shown: the `keys` of state that a graph writes, and whether a graph serves one call alone.

    `allowed` is what graphs may carry.
    """

    def __init__(self, allowed: Carrying) -> None:
        self.allowed, self.keys, self.is_single = allowed, set[Key](), False
        self.fault: TraceError | None = None
        self._changes: list[StateChange] = []
        self._model: nn.Module | None = None

    def learn(self, fault: TraceError, keys: frozenset[Key]) -> bool:
        """Take over the keys of a failed recording. Return whether one is new, so that another recording may succeed."""
        if keys <= self.keys or self.allowed is Carrying.NOTHING:
            return False
        self.fault = copy.copy(fault)
        self.keys |= keys
        return True

    def serve_once(self, fault: TraceError) -> bool:
        """Let recordings serve one call alone. Return whether they did not before, and may."""
        if self.is_single or self.allowed is Carrying.NOTHING:
            return False
        self.is_single, self.fault = True, copy.copy(fault)
        return True

    def divided(self, changes: Sequence[StateChange], model: nn.Module) -> list[StateChange]:
        """Return the changes without those that the graph makes in place, which are kept here."""
        self._model, self._changes, remaining, memory = model, [], [], set[int]()
        for change in changes:
            own = {storage_key(one) for one in _tensors(change.before)} if _key(change) in self.keys else set[int]()
            if own and not own & memory and _fits(change, are_sizes_fixed=True):
                memory |= own
                self._changes.append(change)
            else:
                remaining.append(change)
        return remaining

    def without(self, changes: Iterable[StateChange]) -> list[StateChange]:
        """Return the changes of a second call without those that the graph makes in place."""
        return [one for one in changes if not any(map(one.is_at, self._changes))]

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Let a second call begin with the tensors that the graph writes."""
        for change in self._changes:
            _put(change, change.before)
        yield

    @property
    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(Tensor before, new tensor) of what the present recording has replaced."""
        pairs = [pair for one in self._changes for pair in zip(_tensors(one.before), _tensors(one.value), strict=True)]
        return [(before, value) for before, value in pairs if before is not value]

    def facts(self) -> CarriedFacts | None:
        """Return what the graph carries; None if nothing."""
        if self.fault is None or self._model is None or not (self._changes or self.is_single):
            return None
        places = []
        for change in self._changes:
            owner = self._model.get_submodule(change.place.owner)
            places.append(EffectPlace(ContainerRoute.to(change.place.container, owner, change.place.name), change.key))
        names = tuple(
            ".".join(filter(None, (owner, path, str(key)))) for owner, path, key in sorted(self.keys, key=str)
        )
        return CarriedFacts(tuple(places), self.is_single, self.fault, names)


def carried_keys(changes: Iterable[StateChange]) -> frozenset[Key]:
    """Return the keys of the changes that a graph can write in place, if its sizes are fixed."""
    return frozenset(_key(change) for change in changes if not change.is_buffer and _fits(change))


def has_batch_size(change: StateChange) -> bool:
    """Return whether a size of the tensors that a change leaves depends on the batch size."""
    return any(isinstance(size, torch.SymInt) for tensor in _tensors(change.value) for size in tensor.shape)


def is_fixed_buffer(change: StateChange) -> bool:
    """Return whether a change gives a buffer a tensor of the size of the batch, and of the shape before at the batch size of the example."""
    before, value = change.before, change.value
    is_pair = change.is_buffer and isinstance(before, torch.Tensor) and isinstance(value, torch.Tensor)
    return is_pair and has_batch_size(change) and before.dtype == value.dtype and before.shape == value.shape


def is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Return whether another tensor can take the place of this one: it is none of a subclass, has values and no gradient."""
    is_strided = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    return is_strided and not tensor.is_meta and not tensor.requires_grad


def _key(change: StateChange) -> Key:
    return change.place.owner, change.place.name, change.key


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _fits(change: StateChange, *, are_sizes_fixed: bool = False) -> bool:
    """Return whether tensors of one kind, apart in memory, are replaced by others of the same kind, at one key."""
    if change.key is None or change.is_removal or not isinstance(change.place.container, (dict, list)):
        return False
    (before, structure), (after, found) = pytree.tree_flatten(change.before), pytree.tree_flatten(change.value)
    if structure != found or not all(_is_alike(*pair, are_sizes_fixed) for pair in zip(before, after, strict=True)):
        return False
    tensors = _tensors(change.before)
    return bool(tensors) and len({storage_key(one) for one in tensors}) == len(tensors)


def _is_alike(before: Any, after: Any, are_sizes_fixed: bool) -> bool:
    """Return whether a graph can write a leaf into what was there."""
    if not isinstance(before, torch.Tensor):
        return isinstance(before, PLAIN) and type(before) is type(after) and before == after
    if not isinstance(after, torch.Tensor) or isinstance(before, FakeTensor) or not is_plain_tensor(before):
        return False
    if after.requires_grad or before.dtype != after.dtype or before.dim() != after.dim():
        return False
    sizes = zip(before.shape, after.shape, strict=True)
    return all((not are_sizes_fixed and isinstance(new, torch.SymInt)) or old == new for old, new in sizes)


def _put(change: StateChange, value: Any) -> None:
    change.place.container[change.key] = value
