"""Write-back of buffers that `forward` replaces: the graph writes the new value into the tensor that the model owns.

    mean = get_attr(mean)            mean = get_attr(mean)
    new = f(mean)            ──►     before = mean.clone()         autograd may have saved the old value
                                     new = f(before)
                                     mean.copy_(new.detach())

A buffer that is replaced by a tensor of another shape or dtype is a cache, which each run computes again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import fx

from pipecompile.torch_private.modules import buffers_of
from pipecompile.tracing.ambient_modes import Ambient
from pipecompile.tracing.emit.value_nodes import ValueNodes, storages
from pipecompile.tracing.node_facts import facts, note, set_facts, value_of

__all__ = ["write_back_buffers"]


def write_back_buffers(values: ValueNodes, ambient: Ambient) -> None:
    """Append the writes to the graph, outside of all regions. The fake tensors are still in the model's tables."""
    for twin, new in _replaced(values):
        source, attribute = values.node(new), values.node(twin)
        if attribute.users:
            _read_a_copy(attribute, ambient)
        detached = _call("detach", source, ambient)
        note(_call("copy_", attribute, ambient, detached), mutates=storages([twin]))


def _replaced(values: ValueNodes) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for module, key, twin in values.buffers:
        new = buffers_of(module).get(key)
        if new is not None and new is not twin and (new.shape, new.dtype) == (twin.shape, twin.dtype):
            yield twin, new


def _read_a_copy(attribute: fx.Node, ambient: Ambient) -> None:
    with attribute.graph.inserting_after(attribute):
        copy = _call("clone", attribute, ambient)
    attribute.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)


def _call(method: str, node: fx.Node, ambient: Ambient, *args: fx.Node) -> fx.Node:
    call = node.graph.call_method(method, (node, *args))
    set_facts(call, replace(facts(node), ambient=ambient, mutates=frozenset()), value_of(node))
    return call
