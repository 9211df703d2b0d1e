"""Stages through `torch.compile`: one compiled function a stage, made at its first call and kept for all programs of a build.

The backward of a compiled region is one node of the autograd graph, so a schedule that splits backwards has all of it in I.
What notes things as it runs (a piece kept whole, a BatchNorm that defers) runs as it is, between two regions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from pipecompile.errors import InputError
from pipecompile.runtime.batchnorm import DeferredNorm
from pipecompile.stages import Stage
from pipecompile.tracing.opaque.kept import Kept

__all__ = ["check_backend", "stage_functions"]


def check_backend(choice: bool | str) -> None:
    """Raise InputError for a backend that `torch.compile` does not know."""
    if isinstance(choice, str) and choice not in (known := torch.compiler.list_backends(exclude_tags=())):
        raise InputError(f"compile_stages={choice!r} is no backend of torch.compile", hint=", ".join(known))


def stage_functions(stages: Sequence[Stage], choice: bool | str) -> tuple[Callable[..., Any], ...]:
    """What computes each stage: its module, or that compiled."""
    if not choice:
        for stage in stages:
            _put_within_reach(stage.module)
        return tuple(stage.module.forward for stage in stages)
    return tuple(_compiled(stage, "inductor" if choice is True else choice) for stage in stages)


def _put_within_reach(stage: nn.Module) -> None:
    """Children of a stage, and of the empty modules that lead to others, become plain attributes as well: `self.layer` then takes
    a tenth of the time, since Python asks `nn.Module.__getattr__` last. Modules of the user are left alone.
    """
    waiting = [stage]
    for module in waiting:  # grows meanwhile
        module.__dict__.update(module._modules)
        waiting += [child for child in module._modules.values() if type(child) is nn.Module]


def _compiled(stage: Stage, backend: str) -> Callable[..., Any]:
    for module in stage.module.modules():
        if isinstance(module, (Kept, DeferredNorm)):
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign, no-untyped-call]
    for node in stage.module.graph.nodes:
        if getattr(node.target, "__module__", None) == DeferredNorm.__module__:
            node.target = torch.compiler.disable(node.target)  # type: ignore[no-untyped-call]
    stage.module.recompile()
    return torch.compile(stage.module.forward, backend=backend)
