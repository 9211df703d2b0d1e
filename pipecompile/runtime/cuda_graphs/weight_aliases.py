"""Aliases of weights: tensors on the same memory, with which a capture computes instead of the weights themselves.

    captured graph    out ──► ... ──► AccumulateGrad of the alias       kept for every replay, on the stream of the capture
    a step            out ──► replay ─► AccumulateGrad of the weight    made anew, on the stream of the step

Autograd has one AccumulateGrad node per tensor while anything holds it. A capture on the weights themselves would hold theirs, made on its
own stream: the gradient of each weight would be added there, with two more waits each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from pipecompile.torch_private.modules import parameters_of

__all__ = ["WeightAliases"]


class WeightAliases:
    """The aliases of the parameters of some modules, made at the first use; parameters with ids in `shared` have none."""

    def __init__(self, module: nn.Module | None = None, shared: frozenset[int] = frozenset()) -> None:
        tables = [parameters_of(one) for one in (() if module is None else module.modules())]
        self.places = [
            (table, name)
            for table in tables
            for name, tensor in table.items()
            if type(tensor) is nn.Parameter and tensor.requires_grad and id(tensor) not in shared
        ]
        self._of: dict[int, tuple[torch.Tensor, nn.Parameter]] = {}
        self._weights: dict[int, torch.Tensor] = {}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the modules compute with the aliases."""
        before = [(table, name, table[name]) for table, name in self.places]
        try:
            for table, name, weight in before:
                if isinstance(weight, nn.Parameter):
                    table[name] = self._alias(weight)
            yield
        finally:
            for table, name, weight in before:
                table[name] = weight

    def weight_of(self, leaf: torch.Tensor) -> torch.Tensor:
        """Return the weight whose alias a leaf of the captured graph is, or the leaf itself."""
        return self._weights.get(id(leaf), leaf)

    def _alias(self, weight: nn.Parameter) -> nn.Parameter:
        """Return the alias, with a version counter of its own: an optimizer may write the weight between two replays."""
        if id(weight) not in self._of:
            alias = nn.Parameter(weight.data, weight.requires_grad)
            self._of[id(weight)] = weight, alias
            self._weights[id(alias)] = weight
        return self._of[id(weight)][1]
