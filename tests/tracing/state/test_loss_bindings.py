"""Names that a loss binds are found through functions, methods and partials; what a forward binds is none of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import nn

from pipecompile.tracing.state.loss_bindings import bound_by_loss


class Resetting(nn.Module):
    def forward(self, x):
        self.aux = x
        return x

    def reset(self):
        self.aux_seen = None


MODEL = Resetting()


def reads(output, target):
    return output + MODEL.aux


def resets(output, target):
    MODEL.reset()
    return output


class Trainer:
    def loss(self, output, target):
        self.total = output
        return resets(output, target)

    def __call__(self, output, target):
        self.called = True
        return output


@pytest.mark.parametrize(
    ("loss", "names"),
    [
        (reads, set()),
        (resets, {"aux_seen"}),
        (partial(resets), {"aux_seen"}),
        (lambda output, target: resets(output, target), {"aux_seen"}),
        (Trainer().loss, {"total", "aux_seen"}),
        (Trainer(), {"called"}),
        (nn.MSELoss(), set()),
        (None, set()),
    ],
)
def test_names_that_a_loss_binds(loss: Callable[..., Any] | None, names: set[str]) -> None:
    assert bound_by_loss(loss) == names
