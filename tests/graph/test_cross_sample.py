"""Calls that mix samples are reported; layers that would cut sequences, or see too few samples, are found before a run."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.graph.cross_sample import has_batch_norm, single_value_norm


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
    assert "meet at test_cross_sample.py:" in str(warning.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        piped(Contrast(), n_microbatches=1)(x)
        piped(Sequence(nn.Linear(8, 8)))(x)


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


@pytest.mark.parametrize("options", [{"batch_norm": "deferred"}, {"dispatch": "threads"}], ids=str)
def test_layers_that_speak_to_other_processes_are_refused_where_they_would_be_wrong(
    options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.SyncBatchNorm(8))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda _group=None: 2)
    with pytest.raises(pc.InputError, match="SyncBatchNorm layer of several processes"):
        pc.compile(
            model,
            2,
            devices=["cpu"] * 2,
            example_args=(torch.randn(8, 8),),
            n_microbatches=2,
            cost="analytic",
            **options,
        )
