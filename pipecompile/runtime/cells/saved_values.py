"""Tensors that the nodes of an autograd graph saved, and copies of those that later micro-batches write.

    F0   y = h * self.scale       saves the memory of scale    ──►  saves a copy
    F1   self.scale.mul_(0.9)     eager runs B0 before F1
    B0   reads scale as it was in F0

Eager autograd would refuse B0: what it saved has been written. A write in F0 itself, after the read, is refused in eager, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

from pipecompile.torch_private.autograd_engine import raw_saved_names, unpacked_name
from pipecompile.torch_private.storages import storage_key

__all__ = ["copy_saved", "saved_names"]

_NAMES: dict[type, tuple[tuple[str, str], ...]] = {}


def saved_names(node: Node) -> tuple[tuple[str, str], ...]:
    """Return (raw, unpacked) names of the attributes that hold what a node saved."""
    kind = type(node)
    if kind not in _NAMES:
        _NAMES[kind] = tuple((name, unpacked_name(name)) for name in raw_saved_names(node))
    return _NAMES[kind]


def copy_saved(edges: Sequence[GradientEdge | None], written: Sequence[torch.Tensor]) -> None:
    """Let the graphs behind `edges` keep copies of what they saved of the memory of the tensors `written`. Linear in the nodes."""
    memory = {storage_key(tensor) for tensor in written if tensor.layout is torch.strided}
    for node in _nodes(edges):
        for raw, unpacked in saved_names(node):
            value: Any = getattr(node, raw)
            for saved in value if isinstance(value, tuple) else (value,):
                if _lives_in(memory, saved.data) and saved.unpack_hook is None:
                    with suppress(RuntimeError):  # written since: the backward says so, as in eager
                        getattr(node, unpacked)
                        saved.register_hooks(torch.clone, _itself)


def _nodes(edges: Sequence[GradientEdge | None]) -> Iterator[Node]:
    pending = [edge.node for edge in edges if edge is not None]
    seen = set[Node]()
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            yield node
            pending += [after for after, _ in node.next_functions if after is not None]


def _lives_in(memory: set[int], data: Any) -> bool:
    return isinstance(data, torch.Tensor) and data.layout is torch.strided and storage_key(data) in memory


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
