"""Comparison of what two calls of a model leave on it: a value of the second that the first has made is state, which each call reads.

self.last = h                           both calls leave what they have computed
self.seen = self.seen[-1:] + [h]        the second leaves two tensors, and one is of the first call
self.old, self.new = self.new, h        the second leaves in `old` what the first has computed
self.last = self.calls, h               the second leaves another number beside the tensor
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import fx

from pipecompile.batching.containers import flatten_containers
from pipecompile.tracing.emit.value_nodes import ValueNodes
from pipecompile.tracing.state.leftover_state import StateChange

__all__ = ["is_equal_leaf", "left_alike"]


def left_alike(
    changes: Sequence[StateChange],
    later: Sequence[StateChange],
    values: ValueNodes,
    first: Sequence[fx.Node],
    constants: AbstractSet[fx.Node],
) -> bool:
    """Return whether the second call, which makes the changes `later`, leaves tensors at the places of the first, none that the
    first has made, and beside them equal numbers. `first` are the nodes of the first call; results of `constants` both calls may leave.
    """
    made = set(first) - constants
    pairs = [(change, other) for change in changes for other in later if change.is_at(other)]
    return all(_alike(change.value, other.value, values, made) for change, other in pairs if change.tensors)


def _alike(value: Any, other: Any, values: ValueNodes, made: AbstractSet[fx.Node]) -> bool:
    (leaves, structure), (others, found) = flatten_containers(value), flatten_containers(other)
    pairs = zip(leaves, others, strict=False)
    return structure == found and all(is_equal_leaf(a, b) and not _is_of_first(b, values, made) for a, b in pairs)


def _is_of_first(leaf: Any, values: ValueNodes, made: AbstractSet[fx.Node]) -> bool:
    return isinstance(leaf, torch.Tensor) and values.has_node_for(leaf) and values.node(leaf) in made


def is_equal_leaf(one: Any, other: Any) -> bool:
    """Return whether two leaves are equal, or both are tensors, which `left_alike` compares."""
    return type(one) is type(other) and (isinstance(one, torch.Tensor) or bool(one == other))
