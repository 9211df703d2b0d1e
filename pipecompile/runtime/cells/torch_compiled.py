"""Stages through `torch.compile`: one compiled function a stage, made at its first call, for all programs of a build.

The backward of a compiled region is one node of the autograd graph, so in a schedule that splits backwards I does all of it.
Modules that keep notes as they run (opaque calls, deferred BatchNorm) run uncompiled, between two compiled parts. So do regions of the
user's own `torch.utils.checkpoint` that write buffers: compiled, their recomputation would not write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipecompile.errors import InputError
from pipecompile.graph.stages import Stage
from pipecompile.runtime.cells.deferred_batchnorm import DeferredBatchNorm
from pipecompile.runtime.cells.stage_call import StageCode
from pipecompile.text.input_checks import near
from pipecompile.text.shown_value import shown
from pipecompile.tracing.emit.region_graphs import install_regions
from pipecompile.tracing.node_facts import has_regions
from pipecompile.tracing.opaque.opaque_module import OpaqueModule

__all__ = ["check_backend", "stage_codes"]


def check_backend(choice: bool | str) -> None:
    """Raise InputError for a backend that `torch.compile` does not know."""
    if isinstance(choice, str) and choice not in (known := torch.compiler.list_backends(exclude_tags=())):
        what, hint = (
            f"compile_stages={shown(choice)} is not a backend of torch.compile",
            f'compile_stages="{near(choice, known)}"',
        )
        raise InputError(what, why=f"known are {', '.join(torch.compiler.list_backends())}", hint=hint)


def stage_codes(stages: Sequence[Stage], choice: bool | str) -> tuple[StageCode, ...]:
    """Return the code of each stage, compiled if `choice` is True (inductor) or names a backend."""
    if not choice:
        return tuple(StageCode.of(stage.module) for stage in stages)
    return tuple(StageCode(_compiled(stage, "inductor" if choice is True else choice)) for stage in stages)


def _compiled(stage: Stage, backend: str) -> Callable[..., Any]:
    for module in stage.module.modules():
        if isinstance(module, (OpaqueModule, DeferredBatchNorm)):
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign, no-untyped-call]
    for node in stage.module.graph.nodes:
        if getattr(node.target, "__module__", None) == DeferredBatchNorm.__module__:
            node.target = torch.compiler.disable(node.target)  # type: ignore[no-untyped-call]
    stage.module.recompile()
    if has_regions(stage.module.graph.nodes):
        install_regions(stage.module, torch.compiler.disable)
    return torch.compile(stage.module.forward, backend=backend)
