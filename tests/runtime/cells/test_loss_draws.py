"""Losses that draw random numbers equal the plain loop: recomputed, measured, and beside stages that draw."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.runtime.cells.loss_draws import LossDraws
from tests.support.eager import accumulate, assert_same

pytestmark = pytest.mark.filterwarnings("ignore::pipecompile.RecordingWarning")


class Noisy(nn.Module):
    """A loss with a layer and generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.generator = nn.Dropout(0.4), torch.Generator().manual_seed(1)
        self.numbers = np.random.default_rng(1)

    def forward(self, output, target):
        noise = torch.randn(output.shape, generator=self.generator)
        return F.mse_loss(self.dropout(output) + noise, target) * float(self.numbers.uniform(0.5, 2))


def closed_over() -> Callable[..., torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return lambda output, target: F.mse_loss(output + torch.randn(output.shape, generator=generator), target)


def of_python(output, target):
    rows = torch.from_numpy(np.random.permutation(len(target))[:1])
    return F.mse_loss(output[rows], target[rows]) * random.uniform(0.5, 2)


def network(rate: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(rate), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("make", [Noisy, closed_over, lambda: of_python], ids=["module", "closure", "python"])
def test_a_loss_draws_as_in_the_loop(make: Callable[[], Any], checkpoint: Any) -> None:
    model, x, target = network(), torch.randn(8, 4), torch.randn(8, 2)
    eager = copy.deepcopy(model)
    pipe = pc.compile(model, 2, n_microbatches=4, loss_fn=make(), cost="analytic", checkpoint=checkpoint)
    loss_fn = make()

    def seed() -> None:
        torch.manual_seed(1), random.seed(1), np.random.seed(1)

    for _ in range(2):
        seed()
        loss = pipe.step(x, target=target)
        ends = torch.get_rng_state(), random.getstate()
        seed()
        torch.testing.assert_close(loss, accumulate(eager, x, 4, loss_fn, target))
        assert torch.equal(ends[0], torch.get_rng_state())
        assert ends[1] == random.getstate()
    assert_same(model, eager, 1e-6)


@pytest.mark.filterwarnings("default::pipecompile.RecordingWarning")
@pytest.mark.parametrize(("loss_fn", "is_warned"), [(closed_over(), True), (F.mse_loss, False)], ids=["draws", "plain"])
@pytest.mark.parametrize(
    "options", [{"dispatch": "threads"}, {"schedule": "interleaved", "devices": ["cpu"] * 2}], ids=str
)
def test_a_loss_beside_a_stage_that_draws_is_in_the_warning(options: Any, loss_fn: Any, is_warned: bool) -> None:
    stages = 4 if "schedule" in options else 2
    pipe = pc.compile(network(0.2), stages, n_microbatches=4, loss_fn=loss_fn, cost="analytic", pin={"1": 0}, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe.step(torch.randn(8, 4), target=torch.randn(8, 2))
    assert any("random numbers are drawn in stages 0" in str(one.message) for one in caught) == is_warned


def test_the_first_call_shows_whether_a_loss_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs a loss that drew in a later call alone was recomputed with other numbers."""
    draws, quiet = LossDraws(torch.rand), LossDraws(abs)
    draws.watched(torch.rand)(2), quiet.watched(abs)(-1)
    assert (draws.drew, quiet.drew) == (True, False)
    for kind in ("cpu", "cuda"):
        assert quiet.may_draw_on(torch.device(kind)), "a later call may draw"
    for name in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    assert draws.may_draw_on(torch.device("cuda"))
    assert not quiet.may_draw_on(torch.device("cuda")), "a capture cannot read the generator"
