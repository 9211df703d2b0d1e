"""The target of a step as the analyses of losses see it: its kind, and its values by name."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from pipecompile.batching.containers import flatten_containers
from pipecompile.ir import TARGET

__all__ = ["target_kind", "target_values"]


def target_kind(target: Any) -> Any:
    """Return what the analysis of a loss depends on: structure, dtypes and numbers of dimensions of a target, and its plain values."""
    if target is None or isinstance(target, torch.Tensor):
        return None if target is None else (target.dtype, target.dim())
    leaves, spec = flatten_containers(target)
    kinds = [(leaf.dtype, leaf.dim()) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf) for leaf in leaves]
    return spec, *(kind if isinstance(kind[1], Hashable) else kind[:1] for kind in kinds)


def target_values(target: Any) -> dict[str, Any]:
    """Return a target and its leaves, by name."""
    if isinstance(target, torch.Tensor):
        return {TARGET: target, _FIRST_LEAF: target}
    leaves = [] if target is None else flatten_containers(target)[0]
    return {TARGET: target, **{f"{TARGET}:{place}": leaf for place, leaf in enumerate(leaves)}}


_FIRST_LEAF = f"{TARGET}:0"
