from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pipecompile.torch_private.grad_scalers import note_infinity


@pytest.mark.parametrize("is_unscaled", [True, False])
@pytest.mark.parametrize("has_infinity", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_an_optimizer_without_gradients_takes_what_it_is_told(
    *, is_unscaled: bool, has_infinity: bool, fused: bool
) -> None:
    """Torch raises AssertionError: No inf checks were recorded for this optimizer."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.AdamW([{"params": []}], fused=fused)
    scaler.scale(torch.ones(1))
    note_infinity(scaler, has_infinity=has_infinity)
    if is_unscaled:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (4.0 if has_infinity else 8.0)


def test_gradients_of_its_own_count_as_ever() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.full((2,), 16.0)
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=8.0), torch.optim.SGD([weight], lr=1.0)
    scaler.scale(torch.ones(1))
    note_infinity(scaler, has_infinity=False)
    copied = copy.deepcopy(scaler)
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [-1.0, -1.0]
    assert copied.get_scale() == 8.0
