"""The fast path of attention in evaluation without gradients: it reads the weights of layers, and does not call these.

A layer that was put in the place of another (LoRA, quantization) has no effect there, so a recording, which calls layers, differs from eager.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["FAST_PATH", "SLOW_PATH", "may_take_fast_path", "slow_path"]

FAST_PATH = (
    "without gradients, the attention of torch.nn takes a fast path in evaluation, which reads the weights of its layers and does not call "
    "these: layers put in their place (LoRA) have no effect in eager, and in the recording they have"
)
"""Why a recording differs from a model that takes the fast path."""

SLOW_PATH = (
    "torch.backends.mha.set_fastpath_enabled(False), with which the model computes what its recording computes; "
    "check=False goes on with the recording as it is"
)
"""Advice that makes both equal."""


def may_take_fast_path(model: nn.Module, *, with_grad: bool) -> bool:
    """Return whether a layer of the model has a fast path, and nothing that holds for the whole call rules it out."""
    layers = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
    is_open = torch.backends.mha.get_fastpath_enabled() and not with_grad
    return is_open and any(isinstance(module, layers) and not module.training for module in model.modules())


@contextmanager
def slow_path() -> Iterator[None]:
    """Switch the fast path off inside the block."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
