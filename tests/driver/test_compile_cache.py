"""One plan, many kinds of calls: other batch sizes, lengths, modes and dtypes; what is recorded anew, and what is kept."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from tests.support.eager import accumulate, assert_same, square_loss


def piped(model: nn.Module, n_stages: int = 2, **options: Any) -> pc.Pipeline:
    options = {"cost": "analytic", "devices": ["cpu"] * n_stages, "loss_fn": square_loss, "n_microbatches": 4} | options
    return pc.compile(model, n_stages, **options)


def exact(pipe: pc.Pipeline, eager: nn.Module, x: torch.Tensor, count: int) -> None:
    """A step and a call equal the loop over `count` micro-batches."""
    pipe.zero_grad(), eager.zero_grad()
    torch.testing.assert_close(pipe.step(x), accumulate(eager, x, count), rtol=1e-6, atol=0)
    assert_same(pipe.model, eager, tolerance=1e-5)
    parts = [eager(part) for part in torch.tensor_split(x, count)]
    torch.testing.assert_close(pipe(x), torch.cat(parts))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.token, self.head = nn.Parameter(torch.randn(1, 1, 8)), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        x = x + torch.arange(x.shape[1], dtype=x.dtype)[None, :, None]
        return self.head(self.body(x)[:, 0])


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.interpolate(self.norm(self.a(x)), scale_factor=2)
        return self.b(x.mean((2, 3)).view(x.size(0), -1))


class Windows(nn.Module):
    """Windows of a picture become samples of their own, and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, width = x.shape
        windows = self.a(x.reshape(samples * length // 2, 2, width))
        weights = (windows @ windows.mT / samples**0.5 * samples**0.5).softmax(-1)
        return self.b((weights @ windows).reshape(samples, length, -1))


class Broadcasts(nn.Module):
    """Everything here would broadcast if one sample were mistaken for none."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        index = torch.arange(h.shape[0])
        h = h * (torch.ones(len(h), 4).cumsum(0)[index] > 0)
        best = torch.gather(h, 1, h.argmax(1, keepdim=True))
        return self.b(h.unsqueeze(0).expand(2, -1, -1).mean(0) + best)


SHAPES: dict[type[nn.Module], tuple[int, ...]] = {
    Attention: (5, 8), Convolution: (2, 8, 8), Windows: (4, 3), Broadcasts: (3,)
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("first", [1, 8])
@pytest.mark.parametrize("kind", SHAPES)
def test_one_recording_serves_every_batch_size(kind: type[nn.Module], first: int) -> None:
    torch.manual_seed(0)
    model = kind()
    eager = copy.deepcopy(model)
    pipe = piped(model, example_args=(torch.randn(first, *SHAPES[kind]),))
    for samples in (8, 7, 3, 1):
        exact(pipe, eager, torch.randn(samples, *SHAPES[kind]), min(4, samples))
    assert pipe.explain().traces == 1


class Branch(nn.Module):
    def __init__(self, asks: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self.a, self.b, self.asks = nn.Linear(4, 4), nn.Linear(4, 2), asks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        return self.b(x * 3 if self.asks(x) else x.relu())


def large(x: torch.Tensor) -> bool:
    return x.shape[0] > 2


def test_the_other_side_of_a_branch_is_recorded_once_with_one_warning_of_each_consequence() -> None:
    torch.manual_seed(0)
    model = Branch(large)
    eager = copy.deepcopy(model)
    pipe = piped(model, example_args=(torch.randn(12, 4),))
    plan = pipe.plan
    with warnings.catch_warnings(record=True) as told:
        for samples in (8, 12, 7, 16, 4):
            exact(pipe, eager, torch.randn(samples, 4), 4)
    warning, other = told
    assert "pipe(x) goes the way of micro-batches, and 8 samples at once go another" in str(other.message)
    assert re.search(
        r"test_compile_cache.py:\d+ in Branch.forward .*recorded anew for .* 2 samples", str(warning.message)
    )
    assert pipe.explain().traces == 2
    assert pipe.plan is plan


def test_micro_batches_on_both_sides_become_fewer() -> None:
    torch.manual_seed(0)
    model = Branch(large)
    eager = copy.deepcopy(model)
    pipe = piped(model)
    with warnings.catch_warnings(record=True) as told:
        exact(pipe, eager, torch.randn(11, 4), 3)
        exact(pipe, eager, torch.randn(10, 4), 3)
    (warning,) = told
    assert "11 samples go into 3 micro-batches instead of 4 of 2 and 3 samples" in str(warning.message)
    assert pipe.explain().traces == 1


@pytest.mark.parametrize(
    "asks, samples, count",
    [
        (lambda x: x.shape[0] == 2, 7, 1),
        (lambda x: x.shape[0] == 2, 11, 3),
        (lambda x: x.shape[0] == 1, 7, 3),
        (lambda x: x.shape[0] % 2 == 0, 9, 3),
        (lambda x: x.shape[0] % 2 == 0, 10, 2),
        (lambda x: bool(x.squeeze().dim() == 1), 5, 2),
        (lambda x: int(x.shape[0]) > 100, 13, 1),
        (lambda x: int(x.shape[0]) > 100, 6, 3),
    ],
)
def test_what_straddles_a_branch_is_right(asks: Callable[[torch.Tensor], bool], samples: int, count: int) -> None:
    torch.manual_seed(0)
    model = Branch(asks)
    eager = copy.deepcopy(model)
    pipe = piped(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pc.RecordingWarning)
        x = torch.randn(samples, 4)
        exact(pipe, eager, x, count)
        traces = pipe.explain().traces
        exact(pipe, eager, x, count)
    assert pipe.explain().traces == traces <= 2


def test_a_schedule_for_a_fixed_number_of_micro_batches_is_not_bent() -> None:
    pipe = piped(Branch(large), schedule=pc.build_schedule("gpipe", 2, 4))
    with pytest.raises(pc.InputError, match="branches on the batch size: batch_size > 2"):
        pipe.step(torch.randn(11, 4))


class OneSample(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) != 1:
            raise ValueError("one at a time")
        return self.b(self.a(x).relu())


def test_a_model_that_takes_one_sample_only() -> None:
    model = OneSample()
    x = torch.randn(3, 4)
    torch.testing.assert_close(piped(model)(x), torch.cat([model(row[None]) for row in x]))


class Decoder(nn.Module):
    """A loop over time inside the model: another length is another number of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(11, 8), nn.GRUCell(8, 8), nn.Linear(8, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, h, out = self.embed(tokens), torch.zeros(len(tokens), 8), []
        for t in range(tokens.shape[1]):
            h = self.cell(x[:, t] + torch.tanh(h), h)
            out.append(self.head(h))
        return torch.stack(out, 1)


def test_every_length_trains_with_the_first_plan() -> None:
    torch.manual_seed(0)
    model = Decoder()
    eager = copy.deepcopy(model)
    pipe = piped(model, 3, n_microbatches=2, split_before=["tanh_1", "tanh_2"])
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, eager))
    for length in (4, 7, 2, 7, 1, 4):
        tokens = torch.randint(0, 11, (3, length))
        exact(pipe, eager, tokens, 2)
        ours.step(), theirs.step()
    found = pipe.explain()
    assert found.traces == len(found.kept) == 4
    assert found.hits == 2 * 6 - 4
    assert len({id(build.plan) for build in pipe._cache.entries}) == 1
    longest = max(pipe._cache.entries, key=lambda build: len(build.graph.graph.nodes))
    assert [len(stage.nodes) > 7 for stage in longest.stages] == [True] * 3, "the loop is dealt out in proportion"


def test_the_least_recently_used_goes_and_coming_back_is_told_once() -> None:
    pipe = piped(Scaled(), cache_size=2, n_microbatches=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for length in (2, 3, 2, 4):
            pipe(torch.randn(2, length, 3))
    found = pipe.explain()
    assert ["float32(B, 4, 3)" in one.inputs[0] for one in found.kept] == [True, False]
    assert (found.hits, found.traces, found.evictions) == (1, 3, 1)
    with warnings.catch_warnings(record=True) as told:
        for length in (3, 2, 4, 3):
            pipe(torch.randn(2, length, 3))
    (warning,) = told
    assert "cache_size=4" in str(warning.message)
    with pytest.raises(pc.InputError, match="cache_size=0 is not a whole number"):
        piped(Scaled(), cache_size=0)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, scale: float = 1) -> torch.Tensor:
        return self.b(self.a(x.to(self.a.weight.dtype)) + (x * scale).abs())


def test_a_pipeline_compiles_and_steps_in_anomaly_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    with torch.autograd.detect_anomaly(check_nan=True):
        pipe = pc.compile(
            model, 2, cost="analytic", devices=["cpu"] * 2, n_microbatches=2, loss_fn=lambda y: y.square().mean()
        )
        assert pipe.step(torch.randn(4, 4)).isfinite()
        assert torch.is_anomaly_enabled()
