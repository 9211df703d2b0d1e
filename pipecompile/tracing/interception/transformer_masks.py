"""Masks whose values nn.Transformer reads to choose a faster kernel. A recording has no values, and takes the general kernel.

is_causal=None                    read from the mask: answered with no
src_key_padding_mask in eval      nested tensors leave zeros at padding: answered with no, and warned of where eager would use them
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from pipecompile.errors import RecordingWarning
from pipecompile.tracing.user_source import warn

__all__ = ["causal_mask", "no_nesting"]


class MaskListener(Protocol):
    """The recorder, as far as masks need it."""

    is_grad_enabled: bool

    @property
    def is_listening(self) -> bool:
        """Whether calls of this thread are recorded at this moment."""

    def note_grad_mode_read(self) -> None:
        """Note that the model reads whether gradients are on."""


def causal_mask(listener: MaskListener, original: Any) -> Callable[..., bool]:
    """Return the function that says whether a mask is causal, which asks no values while `listener` listens."""
    return (
        lambda mask, is_causal=None, size=None: bool(is_causal)
        if listener.is_listening
        else original(mask, is_causal, size)
    )


def no_nesting(listener: MaskListener, original: Any) -> Callable[..., bool]:
    """Return the function that says whether padding is at the right, which says no while `listener` listens."""

    def is_left_aligned(source: torch.Tensor, mask: torch.Tensor) -> bool:
        if not listener.is_listening:
            return bool(original(source, mask))
        encoder = sys._getframe(1).f_locals.get("self")
        listener.note_grad_mode_read()
        used = (source, *(encoder.parameters() if isinstance(encoder, nn.Module) else ()))
        if not (listener.is_grad_enabled and any(tensor.requires_grad for tensor in used)):
            warn(_NESTED, RecordingWarning)
        return False

    return is_left_aligned


_NESTED = (
    "in evaluation without gradients, nn.TransformerEncoder leaves zeros at the padding of src_key_padding_mask in eager (nested tensors), "
    "and a recording what it computes there. Try nn.TransformerEncoder(..., enable_nested_tensor=False), which computes the same in both, "
    "if later layers read padded positions"
)
