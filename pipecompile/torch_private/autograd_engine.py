"""Calls of autograd's engine that add to `.grad`, without the checks that `torch.autograd.backward` makes before.

Those are of shapes and dtypes, which the engine looks at again itself: on a small cell they cost as much as its backward
(benchmarks/overhead.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, _engine_run_backward

__all__ = ["accumulate"]


def accumulate(
    roots: Sequence[GradientEdge], gradients: Sequence[torch.Tensor], weights: Sequence[torch.Tensor] = ()
) -> None:
    """The backward from these roots to all leaves, or only to the `weights`."""
    is_plain = gradients[0].is_cpu and not _LOG.isEnabledFor(logging.DEBUG)
    run: Callable[..., object] = _run_here if is_plain else _engine_run_backward
    run(tuple(roots), tuple(gradients), False, False, tuple(weights), allow_unreachable=True, accumulate_grad=True)


_LOG = logging.getLogger("torch.autograd.graph")

_run_here = Variable._execution_engine.run_backward
"""Without what `_engine_run_backward` does for the engine's threads of other devices, and for its log."""
