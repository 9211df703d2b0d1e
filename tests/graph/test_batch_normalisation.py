"""Layers that cannot normalise a micro-batch of one sample are found by the shapes that reach them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.graph.batch_normalisation import has_batch_norm, single_value_norm


class Called(nn.Module):
    """A layer that calls the function itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, None, None, training=True)


def pooled(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), norm, nn.Flatten())


@pytest.mark.parametrize(
    ("model", "shape", "expected"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), (6, 4), "1"),
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False)).eval(), (6, 4), "1"),
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), (6, 4), ""),
        (nn.Sequential(nn.Linear(4, 4), Called()), (6, 4), "1"),
        (nn.BatchNorm1d(5), (6, 5, 3), ""),
        (pooled(nn.BatchNorm2d(4)), (6, 3, 8, 8), "2"),
        (pooled(nn.GroupNorm(1, 4)), (6, 3, 8, 8), ""),
        (nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), (6, 3, 8, 8), ""),
        (nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(5)), (6, 3, 5), ""),
    ],
)  # fmt: skip
def test_one_sample_is_one_value_per_channel(model: nn.Module, shape: tuple[int, ...], expected: str) -> None:
    if shape[0] == 6 and expected:
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            model(torch.randn(1, *shape[1:]))
    assert single_value_norm(pc.trace(model, torch.randn(shape))) == expected


def test_a_frozen_layer_does_not_normalise_by_the_batch() -> None:
    assert has_batch_norm(nn.Sequential(nn.BatchNorm1d(4)))
    assert not has_batch_norm(nn.Sequential(nn.BatchNorm1d(4)).eval())
    assert not has_batch_norm(nn.LayerNorm(4))
