"""Scalers of gradients whose optimizer has none: a rank whose stages are frozen has to scale as the other ranks do."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.amp import GradScaler

__all__ = ["note_infinity"]


def note_infinity(scaler: GradScaler, *, has_infinity: bool) -> None:
    """Tell a scaler whether there is an infinity among gradients that its optimizer does not have. An optimizer without gradients
    takes that for what was found in its own; torch raises AssertionError for it.
    """
    scaler._unscale_grads_ = partial(_found, scaler, has_infinity)  # type: ignore[method-assign]


def _found(scaler: GradScaler, has_infinity: bool, *args: Any) -> dict[torch.device, torch.Tensor]:
    found = type(scaler)._unscale_grads_(scaler, *args)
    inverse_scale: torch.Tensor = args[1]
    device = inverse_scale.device
    return found or {device: torch.full((), float(has_infinity), device=device)}
