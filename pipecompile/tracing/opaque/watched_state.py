"""The tensors of a model that its graph reads and does not write. A run in which a piece kept whole writes one is refused.

A statement may write in a later step a tensor that it wrote in no trial run: `self.layers[i].top.mul_(0.9)`, where `i` depends on the data.
So the version counters of these tensors are compared around every call of a piece. A piece may write tensors that only it reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from threading import current_thread, main_thread

import torch
from torch import fx, nn

from pipecompile.torch_private.storages import version_of
from pipecompile.tracing.emit.value_nodes import ValueNodes, storages
from pipecompile.tracing.node_facts import facts
from pipecompile.tracing.opaque.named_tensors import attribute_tensors

__all__ = ["WatchedState"]


@dataclass(frozen=True, slots=True)
class WatchedState:
    """The names of the tensors and the tensors."""

    names: tuple[str, ...] = ()
    tensors: tuple[torch.Tensor, ...] = ()

    @classmethod
    def of(cls, model: nn.Module, nodes: Iterable[fx.Node], values: ValueNodes) -> WatchedState:
        """Return the tensors of a model whose recording has these nodes."""
        noted = [facts(node) for node in nodes]
        held = (one.reads | one.storages for one in noted)
        only_read = frozenset[int]().union(*held).difference(*(one.mutates for one in noted))
        plain = ((name, tensor, values.twins.of(tensor)) for name, tensor in attribute_tensors(model))
        kept = [(n, tensor) for n, tensor, twin in (*values.owned(), *plain) if storages([twin]) & only_read]
        return cls(tuple(name for name, _ in kept), tuple(tensor for _, tensor in kept))

    def versions(self) -> list[int]:
        """Return how often each tensor was written."""
        return [*map(version_of, self.tensors)]

    def written_since(self, versions: list[int]) -> str:
        """Return the name of a tensor that was written since `versions`, or "".

        In a thread of its own a piece may run while a hook of another stage's backward trains weights: those do not count there.
        """
        if self.versions() == versions:
            return ""
        is_alone = current_thread() is main_thread()
        changed = zip(self.names, self.tensors, versions, strict=True)
        return next((n for n, t, v in changed if version_of(t) != v and (is_alone or not t.requires_grad)), "")
