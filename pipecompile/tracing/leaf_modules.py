"""Which modules stay whole in the graph: those of torch.nn that compute, not those that only contain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pipecompile.torch_private import pytree
from pipecompile.torch_private.modules import NormBase, children_of, has_backward_hooks, has_forward_hooks

__all__ = ["cheap_forward", "is_leaf"]

_WHOLE = (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
"""Leaves although they have children, or parameters under names of their own."""


def is_leaf(module: nn.Module) -> bool:
    """True for a torch.nn module without children (Conv2d, BatchNorm2d, ReLU ...), and for attention and recurrent layers.

    Containers (Sequential, Transformer ...) and everything that users wrote are recorded through, so they can be cut; but
    not a module with backward hooks, which are tied to the autograd graph between its inputs and its outputs.
    """
    if has_backward_hooks(module):
        return True
    if not type(module).__module__.startswith("torch.nn."):
        return False
    return isinstance(module, _WHOLE) or not children_of(module)


def cheap_forward(module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` of a leaf, or something cheaper that gives the same shapes: torch unrolls a recurrent layer, one step will do."""
    plain = isinstance(module, nn.RNNBase) and not has_forward_hooks(module)

    def one_step(x: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return call(x, *args, **kwargs)
        time = 1 if module.batch_first and x.dim() == 3 else 0
        made, state = call(x.narrow(time, 0, 1), *args, **kwargs)
        steps = made.transpose(0, time)
        states = pytree.tree_map(
            lambda one: one.squeeze(0) if one.dim() > x.dim() else one, state
        )  # torch 2.11: one too many
        return steps.repeat(x.shape[time], *[1] * (made.dim() - 1)).transpose(0, time), states

    return one_step if plain else _known_momentum(module, call)


def _known_momentum(module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """BatchNorm without a momentum divides by its own count, which only a run knows; any momentum shows the same shapes."""
    if getattr(module, "momentum", 0.0) is not None or not isinstance(module, NormBase):
        return call

    def known(*args: Any, **kwargs: Any) -> Any:
        module.momentum = 0.1
        try:
            return call(*args, **kwargs)
        finally:
            module.momentum = None

    return known
