"""Leaf modules: modules of torch.nn that compute are one node each, and modules that only contain others are recorded through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pipecompile.torch_private import pytree
from pipecompile.torch_private.modules import NormBase, backward_hooks_of, children_of, forward_hooks_of

__all__ = ["cheap_forward", "has_own_python", "is_leaf"]

_WHOLE = (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
"""Leaves although they have children, or parameters of their own."""


def is_leaf(module: nn.Module) -> bool:
    """Return True for torch.nn modules without children (Conv2d, BatchNorm2d, ReLU ...), attention and recurrent layers.

    Containers (Sequential, Transformer ...) and user modules are recorded through, so that they can be cut. A module
    with backward hooks is a leaf, because its hooks belong to the autograd graph between its inputs and its outputs.
    """
    if any(backward_hooks_of(module)):
        return True
    if not type(module).__module__.startswith("torch.nn."):
        return False
    return isinstance(module, _WHOLE) or not children_of(module)


def has_own_python(module: nn.Module) -> bool:
    """Return whether a module, or one inside it, is of a class that is not torch's: its forward is user code."""
    return any(not type(one).__module__.startswith("torch.") for one in module.modules())


def cheap_forward(module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call` of a leaf, or a cheaper function with results of the same shapes and strides.

    On fake tensors torch unrolls a recurrent layer over time; the cheaper function runs a single time step.
    """
    is_unhooked_rnn = isinstance(module, nn.RNNBase) and not any(forward_hooks_of(module))

    def one_step(x: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return call(x, *args, **kwargs)
        time = 1 if module.batch_first and x.dim() == 3 else 0
        output, state = call(x.narrow(time, 0, 1), *args, **kwargs)
        steps = output.transpose(0, time)
        states = pytree.tree_map(
            lambda tensor: tensor.squeeze(0) if tensor.dim() > x.dim() else tensor, state
        )  # torch 2.11 returns one dimension too many
        return steps.repeat(x.shape[time], *[1] * (output.dim() - 1)).transpose(0, time), states

    return one_step if is_unhooked_rnn else _known_momentum(module, call)


def _known_momentum(module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call` of a BatchNorm without a momentum as if it had one, with the same shapes.

    Such a layer divides by its own count, which is not known while recording.
    """
    if getattr(module, "momentum", 0.0) is not None or not isinstance(module, NormBase):
        return call

    def known(*args: Any, **kwargs: Any) -> Any:
        module.momentum = 0.1
        try:
            return call(*args, **kwargs)
        finally:
            module.momentum = None

    return known
