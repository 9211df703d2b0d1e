"""Custom autograd functions that change modules and objects among their arguments: the call is no node of its own.

    Reversible.apply(x, block)    runs block, whose BatchNorm counts; a node would run it in every trial and recomputation, and uncounted

What is around it is kept whole instead, as other pieces with state are: their changes are noted and undone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from pipecompile.batching.containers import argument_leaves
from pipecompile.errors import TraceError
from pipecompile.torch_private.storages import version_of
from pipecompile.tracing.state.snapshot import can_hold, contents_restored, places_of, tensors_of
from pipecompile.tracing.user_source import caller

__all__ = ["refusing_changes"]


def refusing_changes(apply: Callable[..., Any], cls: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return `apply` of a custom function, which raises TraceError PC114 if it changes more than its tensors."""

    @wraps(apply)
    def checked(*args: Any, **kwargs: Any) -> Any:
        arguments = argument_leaves((args, kwargs))
        own = (
            () if cls.forward.__module__.startswith("pipecompile.") else (cls.forward,)
        )  # ours stands for that of a class of before
        holders = [one for one in (*arguments, *own) if can_hold(one)]
        versions = _versions(holders, arguments)
        with contents_restored(places_of(*holders, deep=True)) as changed:
            result = apply(*args, **kwargs)
        if changed or any(version_of(one) != version for one, version in versions):
            raise TraceError(
                f"cannot trace: {cls.__name__}.apply changes the state of modules or objects",
                code="PC114",
                where=caller(),
                why="a node would change it in every run, also in those that only measure and recompute",
                hint="make the call in the forward of a submodule, which is kept whole",
            )
        return result

    return checked


def _versions(holders: list[Any], arguments: list[Any]) -> list[tuple[torch.Tensor, int]]:
    """Return the tensors that the holders have beside the arguments, with their versions."""
    given = {id(one) for one in arguments}
    return [(one, version_of(one)) for one in tensors_of(*holders) if id(one) not in given]
