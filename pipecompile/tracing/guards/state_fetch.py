"""The check whether anything has changed, in a few expressions that run in C: identity of values, lengths, classes, metadata."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, compress, starmap
from operator import attrgetter, call, is_, is_not
from typing import Any

import torch

from pipecompile.torch_private.hidden_values import addresses_of
from pipecompile.torch_private.modes import FakeTensor
from pipecompile.tracing.guards.lifted_state import NOTHING_LIFTED, LiftedState
from pipecompile.tracing.guards.read_state import ReadState
from pipecompile.tracing.guards.strict_equality import is_same

__all__ = ["StateFetch", "TensorMetadata"]

_flag, _shape = attrgetter("requires_grad"), attrgetter("shape")
_all = attrgetter("requires_grad", "shape", "dtype", "device", "layout")

_NAMES = ("requires_grad", "shape", "dtype", "device", "layout", "strides")


class TensorMetadata:
    """The metadata of tensors at the time of construction; each tensor has a label.

    The address of the memory stands for dtype and device, which are compared only if it differs: an optimizer writes in place.
    """

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        labelled = [(label, tensor) for label, tensor in tensors if not isinstance(tensor, FakeTensor)]
        self.labels = [label for label, _ in labelled]
        self.tensors = [tensor for _, tensor in labelled]
        self._plain = [tensor for tensor in self.tensors if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided]  # fmt: skip
        self.properties = list(map(_properties, self.tensors))
        self._take()

    def _take(self) -> None:
        self._flags, self._shapes = list(map(_flag, self.tensors)), list(map(_shape, self.tensors))
        self._addresses = addresses_of(self._plain)

    def holds(self) -> bool:
        """Return whether all metadata are as they were."""
        tensors = self.tensors
        if (
            list(map(_flag, tensors)) == self._flags
            and list(map(_shape, tensors)) == self._shapes
            and addresses_of(self._plain) == self._addresses
        ):
            return True
        if not all(map(_is_alike, self.properties, map(_properties, tensors))):
            return False
        self._take()
        return True

    def changes(self) -> list[tuple[str, str, Any, Any]]:
        """Return (label, property, value then, value now) of each property that changed."""
        rows = zip(self.labels, self.tensors, self.properties, strict=True)
        return [
            (label, name, before, now)
            for label, tensor, then in rows
            for name, before, now in zip(_NAMES, then, _properties(tensor), strict=True)
            if before != now and not (name == "strides" and _is_freed(now))
        ]


def _properties(tensor: torch.Tensor) -> tuple[Any, ...]:
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return (*_all(tensor), strides)


def _is_alike(then: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    return then == now or (then[:-1] == now[:-1] and _is_freed(now[-1]))


def _is_freed(strides: tuple[int, ...] | None) -> bool:
    """Return whether all elements are one number in memory. So is a sharded parameter until it is gathered, with the strides it had."""
    return bool(strides) and not any(strides or ())


class StateFetch:
    """The state as parallel lists, fetched again by `is_unchanged`. `metadata` are those of its tensors.

    `lifted` are the numbers that the recording reads at every run.
    """

    def __init__(self, state: ReadState, lifted: LiftedState = NOTHING_LIFTED) -> None:
        self._lifted = lifted
        self._holders_of_numbers = {label: state.holders[label] for label in lifted.holders if label in state.holders}  # fmt: skip
        self._kinds = {label: type(holder.get()) for label, holder in self._holders_of_numbers.items()}
        self._fetches = [fetch for fetch, _, _ in state.rows]
        self._holders = [holder for _, holder, _ in state.rows]
        self._values = [value for _, _, values in state.rows for value in values]
        self._sized, self._lengths = state.sized, list(map(len, state.sized))
        self._typed, self._types = state.typed, list(map(type, state.typed))
        self._arrays = [(array, content) for _, array, content in state.arrays]
        self.metadata = TensorMetadata(state.tensors)

    def is_unchanged(self) -> bool:
        """Return whether every value is identical to the one noted, or an immutable value equal to it."""
        return (
            list(map(len, self._sized)) == self._lengths
            and self._has_same_values()
            and all(map(is_, map(type, self._typed), self._types))
            and self.metadata.holds()
            and all(array.tobytes() == content for array, content in self._arrays)
            and (not self._lifted.holders or self._takes_numbers())
        )

    def _takes_numbers(self) -> bool:
        """Take the present values of the numbers that change between steps. Return whether the recording is right for them."""
        try:
            kinds = {label: type(holder.get()) for label, holder in self._holders_of_numbers.items()}
        except (KeyError, AttributeError, IndexError):
            return False
        return kinds == self._kinds and self._lifted.refresh(self._holders_of_numbers)

    def is_surely_changed(self) -> bool:
        """Return whether a value differs that cannot be replaced by an equal one: metadata of a tensor, a plain value."""
        return not self.metadata.holds()

    def _has_same_values(self) -> bool:
        try:
            now = list(chain.from_iterable(map(call, self._fetches, self._holders)))
        except (KeyError, AttributeError, ValueError):  # a name was deleted, a variable emptied
            return False
        then = self._values
        if len(now) != len(then) or not all(
            starmap(is_same, compress(zip(then, now, strict=True), map(is_not, then, now)))
        ):
            return False
        self._values = now
        return True
