from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from pipecompile.tracing import trace


@pytest.mark.parametrize("room", [None, 8])
def test_function_caches_forget_fake_tensors(room):
    @functools.lru_cache(maxsize=room)
    def mask(size: int) -> torch.Tensor:
        return torch.ones(size, size).triu()

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) @ mask(4)

    model, x = Cached(), torch.randn(3, 4)
    graph = trace(model, x)
    assert type(mask(4)) is torch.Tensor
    assert torch.equal(graph(x), model(x))
    assert torch.equal(trace(model, x)(x), model(x)), "what the cache knew before is a constant"


def test_other_caches_are_left_alone():
    @functools.cache
    def square(n: int) -> int:
        return n * n

    square(3)
    trace(nn.Linear(4, 4), torch.randn(2, 4))
    assert square.cache_info().currsize == 1
