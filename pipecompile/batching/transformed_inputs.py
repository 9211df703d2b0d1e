"""Transforms around a call of a pipeline: `torch.compile`, `torch.func` and forward-mode differentiation, which do not reach into
its stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch.autograd.forward_ad import unpack_dual

from pipecompile.errors import InputError
from pipecompile.torch_private.modes import dual_level, is_jit_tracing, transform_stack

__all__ = ["check_untransformed", "refuse_compile"]


def check_untransformed(leaves: Iterable[Any], parameters: Callable[[], Iterable[torch.Tensor]]) -> None:
    """Raise InputError inside of torch.compile, torch.jit.trace and a transform of torch.func, and if an input or a parameter has a
    tangent.
    """
    if torch.compiler.is_compiling():
        refuse_compile("a pipeline is called inside of torch.compile")
    if is_jit_tracing():
        raise InputError(
            "a pipeline is called inside of torch.jit.trace",
            why=_RECORDS_ITSELF,
            hint=f"torch.jit.trace(pipe.model, ...){_ON_RANKS}",
        )
    if transform_stack() is not None:
        raise InputError(
            "a pipeline is called inside of a transform of torch.func (grad, vmap, jvp, functional_call in one of them)",
            why="its stages run on plain tensors, which the transform does not see",
            hint="pipe(x).backward() or torch.autograd.grad(pipe(x).sum(), x); or pipe.model inside of the transform"
            f"{_ON_RANKS}",
        )
    if dual_level() >= 0 and any(map(_has_tangent, (*leaves, *parameters()))):
        raise InputError(
            "an input or a parameter has a tangent: forward-mode differentiation of a pipeline",
            why="its stages run on plain tensors, and the result would have no tangent",
            hint=f"pipe.model(x), the model itself{_ON_RANKS}",
        )


_ON_RANKS = "; on several ranks after pipe.model.load_state_dict(pipe.full_state_dict())"
"""Ending of a hint to use the model itself: each rank has the trained weights of its own stages alone."""

_RECORDS_ITSELF = "a pipeline records and runs its stages itself, which cannot be recorded once more"


def refuse_compile(what: str) -> NoReturn:
    """Raise InputError for a pipeline that is to be compiled by torch."""
    hint = "pipecompile.compile(..., compile_stages=True), which compiles each stage"
    raise InputError(what, why=_RECORDS_ITSELF, hint=hint)


def _has_tangent(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and unpack_dual(value).tangent is not None  # type: ignore[no-untyped-call]
