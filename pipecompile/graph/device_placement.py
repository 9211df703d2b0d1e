"""Graph pass: create the tensors that `forward` makes on the device of their stage.

    zeros((4, 1))                 ──►   zeros((4, 1), device="cuda:1")      a factory that used the device of the recording
    x.to("cpu"), x.cpu()          ──►   x.to("cuda:1")                      a move to the device of the recording
    autocast("cpu", bfloat16)     ──►   autocast("cuda", bfloat16)          autocast of the device of the recording

Tensors that the model puts on another device stay there. Nothing changes if the stage runs on the device of the recording.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from pipecompile.torch_private.device_functions import device_constructors
from pipecompile.torch_private.modes import enter_autocast
from pipecompile.tracing.node_facts import value_of

__all__ = ["follow_device"]


def follow_device(graph: fx.Graph, recorded: torch.device, device: torch.device) -> fx.Graph:
    """Rewrite `graph`, recorded on one device, in place for another, and return it."""
    if _same(recorded, device):
        return graph
    for node in graph.nodes:
        if node.target is enter_autocast:
            node.args = tuple(device.type if argument == recorded.type else argument for argument in node.args)
        elif node.op in ("call_function", "call_method"):
            node.args = fx.node.map_aggregate(node.args, lambda a: device if _names(a, recorded) else a)
            node.kwargs = fx.node.map_aggregate(node.kwargs, lambda a: device if _names(a, recorded) else a)
            if _is_on(node, recorded):
                _follow(node, device)
    return graph


def _same(one: torch.device, other: torch.device) -> bool:
    """Return whether two devices are equal; a device without an index equals any of its type."""
    return one.type == other.type and (one.index == other.index or None in (one.index, other.index))


def _names(argument: Any, recorded: torch.device) -> bool:
    if isinstance(argument, torch.device):
        return _same(argument, recorded)
    return isinstance(argument, str) and argument in (recorded.type, str(recorded))


def _is_on(node: fx.Node, recorded: torch.device) -> bool:
    value = value_of(node)
    return isinstance(value, torch.Tensor) and _same(value.device, recorded)


def _follow(node: fx.Node, device: torch.device) -> None:
    """Pass the device to a call that has none."""
    if node.op == "call_method" and node.target in ("cpu", "cuda"):
        node.target, node.args, node.kwargs = "to", (node.args[0], device), {}
    elif node.target in device_constructors() and node.kwargs.get("device") is None:
        node.update_kwarg("device", device)
