"""A forward that fills a container or an object among its arguments is recorded with a warning, and the argument stays as it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc


class Filling(nn.Module):
    """Puts a hidden value into what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        hidden = self.a(x)
        if isinstance(cache, dict):
            cache[self.a] = hidden
        elif isinstance(cache, list):
            cache.append(hidden)
        elif cache is not None:
            cache.hidden = hidden
        return self.b(hidden)


@pytest.mark.parametrize("cache", [{}, [], {"seen": torch.ones(2)}, SimpleNamespace(kind="a")])
def test_a_filled_argument_is_told_and_stays_as_it_is(cache: Any) -> None:
    model, x = Filling().eval(), torch.randn(2, 4)
    pipe = pc.compile(model, 2, n_microbatches=1, cost="analytic", devices=["cpu"] * 2)
    with (
        torch.no_grad(),
        pytest.warns(pc.RecordingWarning, match=r"Filling.forward changes (cache|an object .*), an argument"),
    ):
        out = pipe(x, cache)
    assert torch.equal(out, model(x, None))
    assert len(vars(cache) if isinstance(cache, SimpleNamespace) else cache) < 2


@pytest.mark.filterwarnings("error")
def test_an_argument_that_is_read_alone_is_not_told() -> None:
    class Reads(Filling):
        def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
            return super().forward(x * cache["scale"], None)

    pc.trace(Reads(), torch.randn(2, 4), {"scale": torch.ones(2, 1), "other": 3})
