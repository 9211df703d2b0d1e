"""Inputs, targets and loss weights of a step, as a CUDA graph of the step takes them: tensors at fixed addresses, numbers as they are.

arrivals   {"x": [x0, x1], "target": [t0, t1], loss weights ...}   ──tensors, each once──►  copied into static tensors
                                                                   └─ the rest ──► part of the signature
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipecompile.runtime.cuda_graphs.stage_graphs import leaf_signature
from pipecompile.torch_private import pytree

__all__ = ["Arrivals"]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The leaves of what arrives. `places` has, per leaf, its index among `tensors`, or None for a leaf that is not a tensor."""

    tensors: Sequence[torch.Tensor]
    places: tuple[int | None, ...]
    leaves: Sequence[Any]
    spec: pytree.TreeSpec

    @classmethod
    def of(cls, arrivals: Mapping[tuple[str, bool], Any]) -> Arrivals:
        """Return the leaves of the arrivals of a frame. A tensor that arrives several times is one tensor."""
        leaves, spec = pytree.tree_flatten(dict(arrivals))
        index: dict[int, int] = {}
        tensors: list[torch.Tensor] = []
        places: list[int | None] = []
        for leaf in leaves:
            is_tensor = isinstance(leaf, torch.Tensor)
            if is_tensor and id(leaf) not in index:
                index[id(leaf)] = len(tensors)
                tensors.append(leaf)
            places.append(index[id(leaf)] if is_tensor else None)
        return cls(tensors, tuple(places), leaves, spec)

    @property
    def signature(self) -> Any:
        """All that a graph depends on."""
        return self.spec, self.places, *self._signatures()

    @property
    def unfit(self) -> str:
        """The type of the first leaf that is neither copied into static memory nor a plain value; "" if there is none."""
        pairs = zip(self.leaves, self._signatures(), strict=True)
        return next((type(leaf).__name__ for leaf, signature in pairs if signature is None), "")

    def _signatures(self) -> Iterator[Any]:
        for leaf in self.leaves:
            yield leaf_signature(leaf, leaf.device if isinstance(leaf, torch.Tensor) else torch.device("cpu"))

    def filled(self, tensors: Sequence[torch.Tensor]) -> dict[tuple[str, bool], Any]:
        """Return the arrivals with other tensors in the place of their own."""
        leaves = [
            leaf if place is None else tensors[place] for leaf, place in zip(self.leaves, self.places, strict=True)
        ]
        arrivals: dict[tuple[str, bool], Any] = pytree.tree_unflatten(leaves, self.spec)
        return arrivals
