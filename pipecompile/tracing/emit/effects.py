"""Calls that are no nodes because they only read metadata, and writes that the version counters of tensors do not show.

    x.requires_grad = True, x.register_hook(f)      the tensor, but not its memory
    F.batch_norm(x, mean, var, training=True)       the running statistics; torch does not declare this write

A later read must see the same state as in the model, so these tensors count as written.
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
_METADATA = frozenset(
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
"""Per function: the position of the running mean, before the variance; the name of the flag, argument 5 in all four, and its default."""


def is_metadata_query(func: Any) -> bool:
    """Return whether the call reads metadata of a tensor, so that no node is needed."""
    return func in _METADATA


def depends_on_grad_mode(func: Any, args: Any) -> bool:
    """Return whether the call makes the recording depend on the caller's grad mode.

    The call reads `requires_grad`, `is_leaf` or `grad_fn` in the user's code, or turns gradients on; the end of a `no_grad` block,
    which restores the mode, does not count.
    """
    if func is set_grad_enabled:
        frame, callers = sys._getframe(2), []
        for _ in range(2):
            callers.append(frame.f_code.co_name)
            frame = frame.f_back or frame
        return bool(args[0]) and "__exit__" not in callers
    return func in _OF_GRADIENTS and not is_foreign(sys._getframe(2))


def accesses_gradient(func: Any) -> bool:
    """Return whether the user's code reads `.grad` or runs a backward."""
    return func in _LEAVES_GRADIENTS and not is_foreign(sys._getframe(2))


def undeclared_writes(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors among the arguments that the call changes although their versions stay."""
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
