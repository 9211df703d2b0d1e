"""Stages whose thread shows: a `threading.local`, and settings of kernels for a part of a forward."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.driver.programs import step_executable
from pipecompile.runtime.thread_state import StagesInThreads

LOCAL = threading.local()


def reading(made: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(made, target) * getattr(LOCAL, "scale", 1.0)


class SettingKernels(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.backends.mkldnn.flags(enabled=False):
            return super().forward(x)


def _stages(layer: type[nn.Linear], loss_fn: Any) -> StagesInThreads:
    model, x = nn.Sequential(layer(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(4, 4)
    pipe = pc.compile(model, 2, example_args=(x,), n_microbatches=2, loss_fn=loss_fn, cost="analytic")
    return StagesInThreads(step_executable(pipe._cache.latest, 2, True).cells)


@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")
@pytest.mark.parametrize(
    ("layer", "loss_fn", "text"),
    [
        (nn.Linear, reading, "reading reads a threading.local"),
        (SettingKernels, F.mse_loss, "the model sets kernels for a part of its forward"),
    ],
)
def test_what_shows_is_warned_of(layer: type[nn.Linear], loss_fn: Any, text: str) -> None:
    stages = _stages(layer, loss_fn)
    assert stages
    with pytest.warns(pc.RecordingWarning, match=text):
        stages.warn()


def test_others_do_not_show() -> None:
    stages = _stages(nn.Linear, F.mse_loss)
    assert not stages
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stages.warn()
