"""The batch of a call as a list of leaves, each with its place: those of the inputs of a batch in their order, then those of its target.

    step(x, mask, target=y)                      leaves  x  mask  y               places  0  1  2       2 inputs
    step(microbatches=[(x, y), (x', y')])        leaves  x  y  x'  y'             places  0  1  0  1    1 input

A recording knows by its place whether a rank reads a leaf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipecompile.batching.containers import flatten_containers
from pipecompile.batching.microbatch_list import arguments_of
from pipecompile.errors import InputError

__all__ = ["CallBatch"]


@dataclass(frozen=True, slots=True)
class CallBatch:
    """The leaves of a batch, or of a list of micro-batches; `n_inputs` counts the inputs of one."""

    leaves: tuple[Any, ...] = ()
    places: tuple[int, ...] = ()
    n_inputs: int = 0

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any = None) -> CallBatch:
        """Return the batch of these arguments: nested containers, or objects that hold tensors."""
        inputs = args if not kwargs and _are_tensors(args) else _leaves((args, kwargs))
        targets = [] if target is None else [target] if type(target) is torch.Tensor else _leaves(target)
        return cls((*inputs, *targets), tuple(range(len(inputs) + len(targets))), len(inputs))

    @classmethod
    def of_list(cls, entries: Any, *, with_target: bool) -> CallBatch:
        """Return the batch of a list of micro-batches; `with_target` if the last entry of a tuple is the target."""
        try:
            each = _of_entries(entries, with_target=with_target)
        except (InputError, TypeError):  # no list of micro-batches, which the call says itself
            return cls.of((entries,), {})
        leaves = tuple(leaf for one in each for leaf in one.leaves)
        if len({(one.n_inputs, one.places) for one in each}) == 1:
            return cls(leaves, each[0].places * len(each), each[0].n_inputs)
        return cls(leaves, tuple(range(len(leaves))), len(leaves))

    @property
    def bits(self) -> int:
        """The places that there are, as bits."""
        return sum(1 << place for place in {*self.places})

    def name(self, index: int) -> str:
        """Return what a leaf is called in an error."""
        place = self.places[index]
        return f"input {place}" if place < self.n_inputs else "target"


def _of_entries(entries: Any, *, with_target: bool) -> list[CallBatch]:
    """Return the batch of each entry, with keyword arguments in the order of the first entry."""
    order: Sequence[str] = ()
    found = []
    for entry in entries:
        args, kwargs = arguments_of(entry, with_target=with_target)
        order = order or [*kwargs]
        named = {name: kwargs[name] for name in (*filter(kwargs.__contains__, order), *kwargs) if name != "target"}
        found.append(CallBatch.of(args, named, kwargs.get("target")))
    return found


def _are_tensors(values: tuple[Any, ...]) -> bool:
    """Return whether all are plain tensors: the usual case, in which nothing has to be taken apart."""
    return all(type(value) is torch.Tensor for value in values)


def _leaves(value: Any) -> list[Any]:
    try:
        return flatten_containers(value)[0]
    except InputError:  # it cannot be taken apart, which the call says itself
        return [value]
