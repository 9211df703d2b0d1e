"""Places where a stage may store tensors: targets of its effect nodes, and objects that its hooks and pieces kept whole can reach."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CellType
from typing import Any

import torch

from pipecompile.errors import InputError
from pipecompile.runtime.cells.kept_gradients import show_gradient
from pipecompile.runtime.cells.side_effects import SideEffects
from pipecompile.tracing.state.change_log import StateHolders
from pipecompile.tracing.state.effect_places import EffectPlace
from pipecompile.tracing.state.hidden_containers import Slots, identity
from pipecompile.tracing.state.snapshot import content_of, places_of, set_content

__all__ = ["LeftPlaces", "exchanged", "gradients_refused"]

Tensors = Mapping[int, tuple[torch.Tensor, torch.Tensor]]
"""Id of a tensor -> (the tensor, its replacement)."""


class LeftPlaces:
    """The places of one stage, in all its recordings."""

    def __init__(self, effects: Sequence[SideEffects]) -> None:
        self._places: tuple[EffectPlace, ...] = tuple(place for one in effects for place in one.places)
        self._holders = StateHolders(tuple(holder for one in effects for holder in one.holders))

    def containers(self) -> list[Any]:
        """Return the containers, each once, in an order that does not depend on their contents."""
        found = [place.container for place in self._places]
        held = [value for place in self._places for value in _parts(place.now())]
        found += [place.container for place in places_of(*held, deep=True)] if held else []
        found += [container for container, _ in self._holders.contents()]
        return list({identity(one): one for one in found}.values())

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors in the containers, each once, without parameters."""
        values = (value for container in self.containers() for value in _values(container))
        found = {id(one): one for value in values for one in _tensors(value)}
        return [one for one in found.values() if not isinstance(one, torch.nn.Parameter)]


@contextmanager
def exchanged(places: Sequence[LeftPlaces], instead: Tensors) -> Iterator[None]:
    """Replace tensors inside the block, and restore them at its end where their replacements still are.

    One tensor may replace several: each place gets its own back. Where the block itself has stored the replacement, the first is stored.
    """
    if not instead:
        yield
        return
    containers = {identity(one): one for place in places for one in place.containers()}
    replaced = _exchange(list(containers.values()), instead)
    try:
        yield
    finally:
        for container, key, new, old in replaced:
            _put_back(container, key, new, old)
        containers |= {identity(one): one for place in places for one in place.containers()}
        _exchange(list(containers.values()), {id(new): (new, old) for old, new in reversed([*instead.values()])})


@contextmanager
def gradients_refused(places: Sequence[LeftPlaces]) -> Iterator[None]:
    """Make differentiable tensors that the block stores refuse a backward, which would run the graph of one stage and micro-batch."""
    before = {id(one): one for place in places for one in place.tensors()}
    yield
    new = [one for place in places for one in place.tensors() if id(one) not in before and one.requires_grad]
    trigger = torch.empty(0, requires_grad=True)
    instead = {id(one): (one, _Refusing.apply(trigger, one.detach(), (one,))) for one in new}
    for one, shown in instead.values():
        if one.retains_grad:
            show_gradient(one, shown)
    _exchange([one for place in places for one in place.containers()] if instead else [], instead)


class _Refusing(torch.autograd.Function):
    """The identity, whose backward raises. If the gradient of `made`, the replaced tensor, is retained, `made` lives as long."""

    @staticmethod
    def forward(ctx: Any, trigger: torch.Tensor, values: torch.Tensor, made: tuple[torch.Tensor]) -> torch.Tensor:  # noqa: ARG004 the trigger has the gradient
        ctx.made = made if made[0].retains_grad else ()
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # noqa: ARG004 it always raises
        raise InputError(
            "a tensor that a call of the pipeline left on the model or in an object has no gradient",
            why="it is that of the last micro-batch alone, and belongs to the stage that made it",
            hint='return it from forward; or let loss_fn of step read it, with across_batch="each"',
        )


_Replaced = tuple[Any, Any, Any, Any]
"""(container, key, new value, old value)."""


def _exchange(containers: Sequence[Any], instead: Tensors) -> list[_Replaced]:
    """Replace tensors, and return the replacements that were made."""
    replaced = [one for container in containers for one in _replaced(container, instead)]
    for container, key, new, _ in replaced:
        _put(container, key, new)
    return replaced


def _replaced(container: Any, instead: Tensors) -> Iterator[_Replaced]:
    for key, value in _items(container):
        if (new := _mapped(value, instead)) is not value:
            yield container, key, new, value


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    """Return the (key, value) pairs of a container whose values can be replaced; none of a set."""
    if isinstance(container, (list, deque)):
        return enumerate(container)
    return content_of(container) if isinstance(container, (dict, CellType, Slots)) else ()


def _put(container: Any, key: Any, value: Any) -> None:
    if isinstance(container, (dict, list, deque)):
        container[key] = value
    else:
        set_content(container, [(name, value if name == key else one) for name, one in content_of(container)])


def _put_back(container: Any, key: Any, new: Any, old: Any) -> None:
    """Restore an old value where its replacement still is."""
    if isinstance(container, (list, deque)):
        value = container[key] if key < len(container) else None
    else:
        value = (container if isinstance(container, dict) else dict(content_of(container))).get(key)
    if value is new:
        _put(container, key, old)


def _parts(value: Any) -> list[Any]:
    """Return a list with the value if it may have containers in it; an empty list for a tensor."""
    return [] if isinstance(value, torch.Tensor) else [value]


def _values(container: Any) -> Iterator[Any]:
    """Yield the values in a container."""
    if isinstance(container, (dict, CellType, Slots)):
        yield from (value for _, value in content_of(container))
    elif isinstance(container, (list, deque, set)):
        yield from content_of(container)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield a tensor, or the tensors in nested tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for one in value:
            yield from _tensors(one)


def _mapped(value: Any, instead: Tensors) -> Any:
    """Return a value with other tensors; the value itself if it has none of them."""
    if isinstance(value, torch.Tensor):
        return instead[id(value)][1] if id(value) in instead else value
    if type(value) is tuple:
        parts = tuple(_mapped(one, instead) for one in value)
        return value if all(new is old for new, old in zip(parts, value, strict=True)) else parts
    return value
