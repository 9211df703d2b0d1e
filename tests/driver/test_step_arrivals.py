"""What arrives in a step: micro-batches, and gradients of losses by what the losses count."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.driver.backend import Backend
from pipecompile.driver.step_arrivals import counted_arrivals, step_arrivals
from pipecompile.errors import InputError
from pipecompile.ir import LOSS, TARGET


@dataclass
class Labels:
    """A target in an object."""

    wanted: torch.Tensor


X, LABELS = torch.randn(4, 3), torch.tensor([1, 0, 1, -100])


def prepared(**options: Any) -> pc.Pipeline:
    pipe = pc.compile(nn.Linear(3, 2), 1, loss_fn=F.cross_entropy, n_microbatches=2, cost="analytic", **options)
    pipe.prepare(X)
    return pipe


def found(pipe: pc.Pipeline) -> Any:
    return pipe._cache.find(pipe._flatten((X,), {}))


def test_losses_weigh_as_much_as_they_count() -> None:
    pipe = prepared()
    arrivals, weights = step_arrivals(pipe._cache, *found(pipe), LABELS, None)
    assert weights == pytest.approx([2 / 3, 1 / 3])
    assert [float(gradient) for gradient in arrivals[LOSS, True]] == pytest.approx([2 / 3, 1 / 3])
    assert [part.tolist() for part in arrivals[TARGET, False]] == [[1, 0], [1, -100]]


def test_gradients_have_the_scale_of_a_scaler_and_weights_have_not() -> None:
    pipe, scaler = prepared(), torch.amp.GradScaler("cpu", init_scale=8.0)
    arrivals, weights = step_arrivals(pipe._cache, *found(pipe), LABELS, scaler)
    assert weights == pytest.approx([2 / 3, 1 / 3])
    assert [float(gradient) for gradient in arrivals[LOSS, True]] == pytest.approx([16 / 3, 8 / 3])


@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
def test_weights_of_a_mean_are_those_of_the_rank_with_the_last_stage(
    monkeypatch: pytest.MonkeyPatch, loss_reduction: str
) -> None:
    others = [0.25, 0.75], torch.tensor([0.25, 0.75])
    monkeypatch.setattr(Backend, "weights_of_target", lambda *_: others)
    pipe = prepared(loss_reduction=loss_reduction)
    assert step_arrivals(pipe._cache, *found(pipe), LABELS, None)[1] == (
        [0.25, 0.75] if loss_reduction == "mean" else [1, 1]
    )


def test_a_target_that_requires_a_gradient_is_refused_in_training() -> None:
    x, target = torch.randn(4, 3), torch.randn(4, 2, requires_grad=True)
    pipe = pc.compile(nn.Linear(3, 2), 1, loss_fn=F.mse_loss, n_microbatches=2, cost="analytic")
    for listed in (False, True):
        step = partial(pipe.step, microbatches=[(x, target)]) if listed else partial(pipe.step, x, target=target)
        with pytest.raises(InputError, match=r"the target requires a gradient(?s:.*)target.detach()"):
            step()
        with torch.no_grad():
            assert step().isfinite()
    pipe.step(x, target=target.detach())


def test_targets_in_objects_and_lists_are_looked_into_like_inputs() -> None:
    """A target that holds itself was a RecursionError, and one in an object was not refused."""
    x, inner = torch.randn(4, 3), torch.randn(4, 2, requires_grad=True)

    def loss_fn(output: torch.Tensor, target: Any) -> torch.Tensor:
        return F.mse_loss(output, target.wanted)

    pipe = pc.compile(nn.Linear(3, 2), 1, loss_fn=loss_fn, n_microbatches=2, cost="analytic")
    with pytest.raises(InputError, match="the target requires a gradient"):
        pipe.step(x, target=Labels(inner))
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(InputError, match="it holds itself, or is nested too deeply"):
        pipe.step(x, target=endless)


def test_a_copy_of_the_pipeline_says_what_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[Any] = []
    monkeypatch.setattr(Backend, "weigh", lambda _, *count: counts.append(count))
    pipe = prepared()
    counted_arrivals(pipe._cache, *found(pipe), LABELS)
    assert counts == []
    monkeypatch.setattr(Backend, "has_copies", True)
    counted_arrivals(pipe._cache, *found(pipe), LABELS)
    assert counts == [(3.0, "what the loss counts", 0.0)]
