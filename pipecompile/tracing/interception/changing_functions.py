"""Custom autograd functions that change modules and objects among their arguments: such a call cannot be a single node.

    Reversible.apply(x, block)    runs block, whose BatchNorm counts; a node would run it in every trial and recomputation, and uncounted

The code around the call is kept whole instead, as other pieces with state are: their changes are noted and undone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from pipecompile.batching.containers import argument_leaves
from pipecompile.errors import RecordingWarning, TraceError
from pipecompile.torch_private.storages import version_of
from pipecompile.tracing.state.function_state import function_restored
from pipecompile.tracing.state.snapshot import can_hold, contents_restored, places_of, tensors_of
from pipecompile.tracing.user_source import caller, warn

__all__ = ["refusing_changes"]


def refusing_changes(apply: Callable[..., Any], cls: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return `apply` of a custom function, which raises TraceError PC114 if it changes more than its tensors."""

    @wraps(apply)
    def checked(*args: Any, **kwargs: Any) -> Any:
        arguments = argument_leaves((args, kwargs))
        is_ours = cls.forward.__module__.startswith(
            "pipecompile."
        )  # in the place of the forward, if `apply` was bound before
        holders = [one for one in (*arguments, *(() if is_ours else (cls.forward,))) if can_hold(one)]
        versions = _versions(holders, arguments)
        function = getattr(cls.forward, "replaced", cls.forward)
        outside = function_restored(function, tensors=False)  # the node changes it in a run
        with outside, contents_restored(places_of(*holders, deep=True)) as changed:
            result = apply(*args, **kwargs)
        is_written = any(version_of(one) != version for one, version in versions)
        if is_written and torch.is_grad_enabled():
            _warn_of_buffers(cls)
        if changed or is_written:
            raise TraceError(
                f"cannot trace: {cls.__name__}.apply changes the state of modules or objects",
                code="PC114",
                where=caller(),
                why="a node would change it in every run, also in those that only measure and recompute",
                hint="make the call in the forward of a submodule, which is kept whole",
            )
        return result

    return checked


def _warn_of_buffers(cls: type[torch.autograd.Function]) -> None:
    warn(
        f"the forward of {cls.__name__}, an autograd function, writes buffers: if its backward writes them too, as reversible blocks and"
        " checkpoints do, they are written in the order of the schedule, unlike in a loop over micro-batches. Try n_microbatches=1",
        RecordingWarning,
    )


def _versions(holders: list[Any], arguments: list[Any]) -> list[tuple[torch.Tensor, int]]:
    """Return the tensors that the holders have beside the arguments, with their versions."""
    given = {id(one) for one in arguments}
    return [(one, version_of(one)) for one in tensors_of(*holders) if id(one) not in given]
