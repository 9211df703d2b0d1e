"""Hooks write into lists that they hold: as variables that they close over, as defaults, as arguments of a partial."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc

pytestmark = pytest.mark.filterwarnings("error::pipecompile.RecordingWarning")


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.first(x).relu())
        return output


def closing_over(log: list[Any], word: str) -> Callable[..., None]:
    return lambda _module, _inputs, output: log.append((word, len(output)))


def with_default(log: list[Any], word: str) -> Callable[..., None]:
    return lambda _module, _inputs, output, log=log: log.append((word, len(output)))


def with_keyword_default(log: list[Any], word: str) -> Callable[..., None]:
    return lambda _module, _inputs, output, *, log=log: log.append((word, len(output)))


def note(_module: nn.Module, _inputs: Any, output: torch.Tensor, log: list[Any], word: str) -> None:
    log.append((word, len(output)))


def with_bound_keywords(log: list[Any], word: str) -> Callable[..., None]:
    return partial(note, log=log, word=word)


@pytest.mark.parametrize("hook", [closing_over, with_default, with_keyword_default, with_bound_keywords])
def test_a_list_that_hooks_of_a_layer_and_of_the_model_hold_gets_an_entry_a_call(hook: Callable[..., Any]) -> None:
    """Defaults were not searched, and what the model's own hook appended was lost; in keywords of a partial the recording left a symbol."""
    log: list[Any] = []
    model = Body()
    model.first.register_forward_hook(hook(log, "layer"))
    model.register_forward_hook(hook(log, "model"))
    pipe = pc.compile(model, 2, n_microbatches=3, loss_fn=F.mse_loss, cost="analytic", devices=["cpu"] * 2)
    for _ in range(2):
        pipe.step(torch.randn(6, 4), target=torch.randn(6, 2))
    assert sorted(log) == [("layer", 2)] * 6 + [("model", 2)] * 6
