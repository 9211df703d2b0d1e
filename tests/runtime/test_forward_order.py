"""Schedules that run micro-batches out of order: what forwards write differs from the plain loop, with a warning."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc

TURNED = pc.Schedule.from_csv("0F1,0F0,0F3,0F2,0B1,0B0,0B3,0B2\n1F1,1B1,1F0,1B0,1F3,1B3,1F2,1B2\n")


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
    )


def _pipe(model: nn.Module, batch_norm: str) -> tuple[pc.Pipeline, torch.Tensor, torch.Tensor]:
    x, target = torch.randn(8, 6), torch.randint(3, (8,))
    pipe = pc.compile(
        model, 2, example_args=(x,), n_microbatches=4, loss_fn=F.cross_entropy, schedule=TURNED, batch_norm=batch_norm, cost="analytic"
    )  # fmt: skip
    return pipe, x, target


def test_statistics_in_another_order_are_warned_of_once() -> None:
    pipe, x, target = _pipe(_model(), "each")
    with pytest.warns(pc.RecordingWarning, match=r"order 1, 0, 3, 2, and writes 1.running_mean, 1.running_var"):
        pipe.step(x, target=target)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.step(x, target=target)


@pytest.mark.parametrize(("batch_norm", "in_eval"), [("deferred", False), ("each", True)])
def test_what_is_not_written_in_an_order_gets_no_warning(batch_norm: str, in_eval: bool) -> None:
    pipe, x, target = _pipe(_model().train(not in_eval), batch_norm)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.step(x, target=target)


def test_what_a_hook_leaves_is_named() -> None:
    model = _model().eval()
    model[0].register_forward_hook(lambda layer, _inputs, made: setattr(layer, "last", made.detach()))
    pipe, x, target = _pipe(model, "each")
    with pytest.warns(
        pc.RecordingWarning, match=r"writes what its hooks and pieces kept whole leave: what it leaves is not what"
    ):
        pipe.step(x, target=target)
