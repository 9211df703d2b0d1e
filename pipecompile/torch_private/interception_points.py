"""Functions of torch that a recording replaces: those that look at values only to choose a kernel or to refuse a call, TorchScript's, and
those of `torch.utils.checkpoint` that begin a region without reentrant autograd.

A point is a pair: the object or module that owns a function, and the function's name there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributions import Distribution
from torch.nn.modules import transformer
from torch.utils import checkpoint

__all__ = [
    "CAUSAL_MASK",
    "NESTED_MASK",
    "NODE_HOOK",
    "REGION_GENERATORS",
    "SCRIPT_CALL",
    "StopRecomputation",
    "VALIDATE_ARGUMENTS",
    "early_stop_override",
    "scripted_source",
]

CAUSAL_MASK: tuple[Any, str] = (transformer, "_detect_is_causal_mask")
"""Compares a mask with the causal one. 2.11."""

NESTED_MASK: tuple[Any, str] = (torch, "_nested_tensor_from_mask_left_aligned")
"""Asks whether a padding mask allows nested tensors. 2.11."""

NODE_HOOK: tuple[Any, str] = (torch.autograd.function._HookMixin, "_register_hook")
"""Puts a hook into those of a node of autograd (`x.grad_fn.register_hook`, `register_prehook`). 2.11."""

VALIDATE_ARGUMENTS: tuple[Any, str] = (Distribution, "_validate_args")
"""The flag by which distributions check their parameters' values. 2.11."""

SCRIPT_CALL: tuple[Any, str] = (torch._C.ScriptFunction, "__call__")
"""The call of a scripted function. 2.11."""


def scripted_source(function: Any) -> Callable[..., Any] | None:
    """Return the Python function that was scripted to `function`, or None. 2.11."""
    known = torch.jit._state._jit_caching_layer.items()
    return next((source for source, name in known if name == function.qualified_name), None)


REGION_GENERATORS = tuple(
    (module, name)
    for module in ("torch.utils.checkpoint", "torch.distributed._composable.checkpoint_activation")
    for name in ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl")
)
"""(module, name) of generator functions: code before their `yield` runs before the region, code after it afterwards. The second
module need not be loaded. 2.11; the second name since 2.15."""


def early_stop_override() -> bool | None:
    """Return what `torch.utils.checkpoint.set_checkpoint_early_stop` has set; None outside of that. 2.11."""
    return checkpoint._enable_checkpoint_early_stop


StopRecomputation: type[Exception] = checkpoint._StopRecomputationError
"""The exception by which a hook of a checkpoint ends the recomputed forward early. 2.11."""
