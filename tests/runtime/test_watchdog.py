"""A step that stands still in one thread is told, once, with where; one that goes on is not."""

from __future__ import annotations

import warnings
from threading import Event, Thread

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.runtime.dispatch import WATCHDOG
from tests.support.eager import square_loss


class Waits(nn.Module):
    """Stands still in the backward of its first stage, when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.reached, self.free = Event(), Event()
        self.free.set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu())

    def wait(self, _gradient: torch.Tensor) -> None:
        self.reached.set()
        assert self.free.wait(20)


def test_a_step_that_stands_still_inline_says_where() -> None:
    model, x = Waits(), torch.randn(2, 4)
    pipe = pc.compile(
        model, 2, example_args=(x,), n_microbatches=1, loss_fn=square_loss, cost="analytic", devices=["cpu"] * 2,
        dispatch="inline", split_before=["b"],
    )  # fmt: skip
    model.a.weight.register_hook(model.wait)
    pipe.step(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):  # one step after another, each at its end
            pipe.step(x)
            WATCHDOG.check()
    model.reached.clear()
    model.free.clear()
    stuck = Thread(target=pipe.step, args=(x,))
    stuck.start()
    assert model.reached.wait(20)
    WATCHDOG.check()
    with pytest.warns(RuntimeWarning, match=r"stood still for 60 s: device 0 at 0B0"):
        WATCHDOG.check()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        WATCHDOG.check()  # it was told
    model.free.set()
    stuck.join()
    pipe.step(x)
