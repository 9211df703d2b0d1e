"""Calls that change nothing and make nothing, and what calls change that the version counters of tensors do not show.

    x.requires_grad = True, x.register_hook(f)      the tensor, but not its memory
    F.batch_norm(x, mean, var, training=True)       the running statistics; torch does not declare this write

Whoever reads these must see the same before and after as in the model, so they count as written.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F

from pipecompile.torch_private.modes import set_grad_enabled
from pipecompile.tracing.user_source import is_foreign

__all__ = ["depends_on_grad_mode", "is_metadata_query", "accesses_gradient", "undeclared_writes"]

_ATTRIBUTES = "shape dtype device ndim is_cuda is_meta layout requires_grad is_leaf itemsize nbytes is_sparse grad_fn"
_METHODS = (
    "size dim stride numel nelement element_size is_contiguous is_floating_point is_complex storage_offset get_device"
)
_QUESTIONS = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES.split()]
    + [getattr(torch.Tensor, name) for name in _METHODS.split()]
)

_OF_GRADIENTS = frozenset(getattr(torch.Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "grad_fn"))

_LEAVES_GRADIENTS = frozenset([getattr(torch.Tensor, "grad").__get__, torch.Tensor.backward])  # noqa: B009

_ON_THE_TENSOR = frozenset({"__set__", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"})

_STATISTICS: dict[Any, tuple[int, str, bool]] = {
    F.batch_norm: (1, "training", False),
    F.instance_norm: (1, "use_input_stats", True),
    torch.batch_norm: (3, "training", False),
    torch.instance_norm: (3, "use_input_stats", True),
}
"""Where the running mean stands, with the variance after it; the flag, in all four the argument at 5, and its default."""


def is_metadata_query(func: Any) -> bool:
    """Is the answer never a tensor, so that there is nothing to write down?"""
    return func in _QUESTIONS


def depends_on_grad_mode(func: Any, args: Any) -> bool:
    """Does what the model does here depend on whether gradients are recorded around it?

    It asks a tensor, or turns gradients on itself; `no_grad` that puts back what was there does not.
    """
    if func is set_grad_enabled:
        frame, way = sys._getframe(2), []
        for _ in range(2):
            way.append(frame.f_code.co_name)
            frame = frame.f_back or frame
        return bool(args[0]) and "__exit__" not in way
    return func in _OF_GRADIENTS and not is_foreign(sys._getframe(2))


def accesses_gradient(func: Any) -> bool:
    """Does the user ask for `.grad`, or run a backward?"""
    return func in _LEAVES_GRADIENTS and not is_foreign(sys._getframe(2))


def undeclared_writes(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Tensors among the arguments that are changed in a way of their own."""
    if func in _STATISTICS:
        first, flag, default = _STATISTICS[func]
        named = (kwargs.get("running_mean"), kwargs.get("running_var"))
        writes = kwargs.get(flag, args[5] if len(args) > 5 else default)
        return (
            [tensor for tensor in (*args[first : first + 2], *named) if isinstance(tensor, torch.Tensor)]
            if writes
            else []
        )
    return list(args[:1]) if func.__name__ in _ON_THE_TENSOR else []
