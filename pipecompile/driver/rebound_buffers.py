"""State that a forward replaces by another tensor: a graph writes it in place, and a call shows a new tensor, as eager leaves one.

model.state = start     the user's tensor, in a buffer; or in an attribute or container that the forward also reads
step                    begins: the graph's tensor takes the values of `start`, and is the state
                        F0 F1 ...: each writes the graph's tensor
                        ends: a copy of the graph's tensor is the state; `start` is as it was
model.state = start     the same recording serves, and reads the same values again
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pipecompile.torch_private import pytree
from pipecompile.torch_private.modules import buffers_of
from pipecompile.tracing.state.carried_state import Carrying, is_plain_tensor
from pipecompile.tracing.state.container_routes import ContainerRoute
from pipecompile.tracing.state.effect_places import EffectPlace
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["ReboundBuffers"]


_KINDS = 16
"""The most tensors of one place, of different shapes: as many as recordings are kept by default."""


@dataclass(slots=True)
class _Slot:
    """A place in the model, and the graph's tensors for it, by the kind of value that they stand for."""

    place: EffectPlace
    own: dict[Any, Any] = field(default_factory=dict)

    def take(self) -> bool:
        """Put tensors of the graph's own in the place. Return whether they are new."""
        value = self.place.now()
        is_new = _is_plain(value) and not _is_same(self.own.get(_kind(value)), value)
        if is_new:
            self.own[_kind(value)] = clone = _cloned(value)
            self.place.put(clone)
        if len(self.own) > _KINDS:
            del self.own[next(iter(self.own))]  # the model is recorded anew if its state is of this shape again
        return is_new

    def enter(self) -> None:
        """Let the graph's tensors take the values of the present ones, and their place."""
        value = self.place.now()
        if _is_plain(value) and (own := self.own.get(_kind(value))) is not None:
            with torch.no_grad():
                for tensor, present in zip(_tensors(own), _tensors(value), strict=True):
                    tensor.copy_(present)
            self.place.put(own)

    def leave(self) -> None:
        """Put copies in the place of the graph's tensors."""
        value = self.place.now()
        if _is_plain(value) and _is_same(self.own.get(_kind(value)), value):
            self.place.put(_cloned(value))


class ReboundBuffers:
    """The graph's tensors of the buffers of `model` that recordings replace, and of other state that they carry on.

    `is_active` is False where others hold the state too, as the ranks of one model do: graphs write the model's own tensors then.
    With `recomputes`, forwards may run again in a backward, after the call.
    """

    def __init__(self, model: nn.Module, *, is_active: bool = True, recomputes: bool = False) -> None:
        self.model, self.is_active, self.recomputes = model, is_active, recomputes
        self._slots: dict[tuple[int, tuple[str, ...], Any], _Slot] = {}
        self._depth, self._is_held = 0, False

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the graph's tensors be the state in this context, and copies of them after it. Calls within a call change nothing."""
        self._depth += 1
        try:
            if self._depth == 1:
                for slot in self._slots.values():
                    slot.enter()
            yield
        finally:
            self._depth -= 1
            if not self._depth and not self._is_held:
                for slot in self._slots.values():
                    slot.leave()
            self._is_held &= bool(self._depth)

    def carrying(self, counts: Iterable[int]) -> Carrying:
        """Return the state that a recording may carry for steps of these numbers of micro-batches."""
        if not self.is_active:
            return Carrying.NOTHING
        return Carrying.SINGLE_CALLS if max(counts) == 1 else Carrying.TENSORS

    def hold(self, graph: TracedGraph) -> None:
        """Leave the graph's tensors in their places after this call, if its backward may run pieces again that are kept whole: these
        read the model's state.
        """
        self._is_held |= self.recomputes and bool(graph.facts.kept)

    def recorded(self, record: Callable[[], TracedGraph]) -> TracedGraph:
        """Return what `record` records, on tensors of the graph's own for the state that the recording replaces."""
        graph = record()
        slots = [*map(self._slot, self._places(graph))] if self.is_active else []
        is_new = [slot.take() for slot in slots]
        return record() if any(is_new) else graph

    def _places(self, graph: TracedGraph) -> Iterator[EffectPlace]:
        """Yield the places of the model that a graph writes in place."""
        for name in graph.facts.rebound:
            path, _, key = name.rpartition(".")
            yield EffectPlace(ContainerRoute(buffers_of(self.model.get_submodule(path))), key)
        if graph.facts.carried:
            yield from graph.facts.carried.places

    def _slot(self, place: EffectPlace) -> _Slot:
        route = place.route
        start = id(route.start) if route.names else id(route.recorded)
        return self._slots.setdefault((start, route.names, place.key), _Slot(place))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _is_plain(value: Any) -> bool:
    """Return whether a value is made of tensors whose place others can take."""
    tensors = _tensors(value)
    return bool(tensors) and all(map(is_plain_tensor, tensors))


def _cloned(value: Any) -> Any:
    """Return a value with copies of its tensors, in new containers."""
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, value)


def _is_same(own: Any, value: Any) -> bool:
    """Return whether a value is made of the graph's tensors."""
    return own is not None and all(one is other for one, other in zip(_tensors(own), _tensors(value), strict=True))


def _kind(value: Any) -> Any:
    leaves, structure = pytree.tree_flatten(value)
    return repr(structure), *map(_leaf_kind, leaves)


def _leaf_kind(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    return type(leaf), repr(leaf)
