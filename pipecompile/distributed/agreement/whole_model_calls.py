"""Functions of torch that take the parameters of a pipeline for those of the whole model: each rank would compute with its own part.

    torch.nn.utils.clip_grad_norm_(pipe.parameters(), 1.0)     a norm per rank ──► another factor on each
    torch.optim.LBFGS(pipe.parameters())                       a line search per rank ──► other steps, and other numbers of calls

They are known by the frame that reads the first parameter; an optimizer that was given a list of them, when it steps.

    torch.optim.AdamW(pipe.parameters())     on a rank without parameters: a group of none, where torch refuses an empty list
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FrameType
from typing import cast

import torch
from torch import nn

from pipecompile.errors import InputError

__all__ = ["parts_of_model", "refuse_optimizer"]


def parts_of_model(parameters: Iterator[nn.Parameter], n_ranks: int) -> Iterator[nn.Parameter]:
    """Yield the parameters of one of `n_ranks` ranks; to an optimizer, for a rank that has none, a group without parameters.

    Raise InputError in a function that has to have those of all.
    """
    frame = inspect.currentframe()
    reader = None if n_ranks == 1 or frame is None else frame.f_back
    if reader is not None:
        _refuse(reader, n_ranks)
    is_empty = True
    for parameter in parameters:
        is_empty = False
        yield parameter
    if is_empty and reader is not None and reader.f_code is torch.optim.Optimizer.__init__.__code__:
        yield cast(nn.Parameter, {"params": []})


def _refuse(reader: FrameType, n_ranks: int) -> None:
    if reader.f_code.co_name == "clip_grad_norm_" and reader.f_globals.get("__name__") == "torch.nn.utils.clip_grad":
        raise InputError(
            "torch.nn.utils.clip_grad_norm_ is given the parameters of a pipeline",
            why=f"each of {n_ranks} ranks has those of its own stages, and would clip by their norm alone",
            hint="pipe.clip_grad_norm_(max_norm), by the norm of the whole model, on all ranks",
        )
    if isinstance(optimizer := reader.f_locals.get("self"), torch.optim.Optimizer):
        refuse_optimizer(optimizer, n_ranks)


def refuse_optimizer(optimizer: torch.optim.Optimizer, n_ranks: int) -> None:
    """Raise InputError for an optimizer that has parameters of one of `n_ranks` ranks, and needs those of all."""
    if n_ranks > 1 and isinstance(optimizer, torch.optim.LBFGS):
        raise InputError(
            "torch.optim.LBFGS is given the parameters of a pipeline",
            why=f"its step depends on all parameters together, and each of {n_ranks} ranks has those of its own stages",
            hint="an optimizer that updates each parameter by its own gradient (AdamW), or devices=[...], the stages in one process",
        )
