"""Samples that meet are told of; a layer that takes the batch for time is refused before it cuts sequences."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import pipecompile as pc


class Sequence(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(4, 8), layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        attends = isinstance(self.layer, nn.MultiheadAttention)
        return (self.layer(x, x, x) if attends else self.layer(x))[0].tanh()


class Contrast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.a(x) @ self.b(x).T).diagonal()


def piped(model: nn.Module, **options: object) -> pc.Pipeline:
    options = {"cost": "analytic", "devices": ["cpu"] * 2, "n_microbatches": 2} | options
    return pc.compile(model, 2, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("layer", [nn.LSTM(8, 8), nn.MultiheadAttention(8, 2)])
def test_a_batch_taken_for_time(layer: nn.Module) -> None:
    model, x = Sequence(copy.deepcopy(layer)), torch.randn(4, 6, 4)
    with pytest.raises(
        pc.InputError, match=r"test_cross_sample.py:\d+ in Sequence.forward(.|\n)*batch_dims={\"x\": 1}"
    ):
        piped(model)(x)
    torch.testing.assert_close(piped(model, batch_dims={"x": 1})(x), model(x))
    whole = piped(model, n_microbatches=1)
    torch.testing.assert_close(whole(x), model(x))
    with pytest.raises(pc.InputError, match="takes the batch for time"):
        whole.reschedule(n_microbatches=2)(x)


@pytest.mark.parametrize("layer", [nn.LSTM(8, 8, batch_first=True), nn.MultiheadAttention(8, 2, batch_first=True)])
def test_a_layer_with_the_batch_first(layer: nn.Module) -> None:
    model, x = Sequence(copy.deepcopy(layer)), torch.randn(4, 6, 4)
    torch.testing.assert_close(piped(model)(x), model(x))


def test_a_sequence_without_a_batch_is_not_cut() -> None:
    with pytest.raises(pc.InputError, match="2 dimensions, of which the first is the batch"):
        piped(Sequence(nn.RNN(8, 8, batch_first=True)))(torch.randn(6, 4))


def test_samples_that_meet_are_told_once() -> None:
    pipe, x = piped(Contrast()), torch.randn(4, 4)
    with warnings.catch_warnings(record=True) as told:
        pipe(x), pipe(x.double().float()), pipe.eval()(x)
    (warning,) = told
    assert "meets every other at test_cross_sample.py:" in str(warning.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        piped(Contrast(), n_microbatches=1)(x)
        piped(Sequence(nn.Linear(8, 8)))(x)
