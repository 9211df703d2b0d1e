"""Calls of autograd's engine that add to `.grad`, without the checks that `torch.autograd.backward` makes before.

Those are of shapes and dtypes, which the engine looks at again itself: on a small cell they cost as much as its backward
(benchmarks/overhead.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward

__all__ = ["accumulate"]


def accumulate(
    roots: Sequence[GradientEdge], gradients: Sequence[torch.Tensor], weights: Sequence[torch.Tensor] = ()
) -> None:
    """The backward from these roots to all leaves, or only to the `weights`."""
    _engine_run_backward(
        tuple(roots), tuple(gradients), False, False, tuple(weights), allow_unreachable=True, accumulate_grad=True
    )
