"""Graph pass: tensors created in `forward` are made on their stage's device.

    zeros((4, 1), device="cpu")   ──►   zeros((4, 1), device="cuda:1")      a factory, wherever it was recorded
    x.to("cpu")                   ──►   x.to("cuda:1")                      a move to the device of the recording

Nothing changes when the model was recorded on the device that the stage runs on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

__all__ = ["follow_device"]


def follow_device(graph: fx.Graph, device: torch.device) -> fx.Graph:
    """Rewrite `graph` in place for `device`, and return it."""
    for node in graph.nodes:
        recorded = _device_of(node)
        if recorded is None or recorded == device or node.op == "placeholder":
            continue
        node.args = fx.node.map_aggregate(node.args, lambda a, old=recorded: _moved(a, old, device))  # type: ignore[assignment]
        node.kwargs = fx.node.map_aggregate(node.kwargs, lambda a, old=recorded: _moved(a, old, device))  # type: ignore[assignment]
        if _is_factory(node):
            node.update_kwarg("device", device)
    return graph


def _device_of(node: fx.Node) -> torch.device | None:
    value = node.meta.get("val")
    return value.device if isinstance(value, torch.Tensor) else None


def _moved(argument: Any, recorded: torch.device, device: torch.device) -> Any:
    if isinstance(argument, torch.device) and argument.type == recorded.type:
        return device
    return device if isinstance(argument, str) and argument == str(recorded) else argument


def _is_factory(node: fx.Node) -> bool:
    """Makes a tensor out of no tensor, by a torch function that takes `device`."""
    made_from = [source for source in node.all_input_nodes if isinstance(source.meta.get("val"), torch.Tensor)]
    return node.op == "call_function" and not made_from and getattr(node.target, "__name__", "") in _FACTORIES


_FACTORIES = frozenset(
    "arange empty eye full linspace logspace ones rand randint randn randperm tensor zeros as_tensor scalar_tensor "
    "tril_indices triu_indices empty_strided hann_window hamming_window blackman_window kaiser_window bartlett_window "
    "asarray".split()
)
