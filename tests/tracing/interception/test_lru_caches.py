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


def test_a_cache_that_earlier_recordings_left_alone_is_purged_later():
    @functools.lru_cache
    def ones(size: int) -> torch.Tensor:
        return torch.ones(size)

    class Cached(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + ones(4)

    assert type(ones(2)) is torch.Tensor
    trace(nn.Linear(4, 4), torch.randn(3, 4))
    assert ones.cache_info().currsize == 1
    trace(Cached(), torch.randn(3, 4))
    assert type(ones(4)) is torch.Tensor


def test_other_caches_are_left_alone():
    @functools.cache
    def square(n: int) -> int:
        return n * n

    square(3)
    trace(nn.Linear(4, 4), torch.randn(2, 4))
    assert square.cache_info().currsize == 1


@functools.lru_cache(maxsize=8)
def halves(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0] * 2, shape[1] // 2)


class Reshaper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    @functools.lru_cache(maxsize=8)  # noqa: B019 as people write it
    def scale(self, size: int) -> float:
        return 1 / size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x).reshape(halves(tuple(x.shape))) * self.scale(x.shape[0])


def test_function_caches_leave_the_batch_size_free_and_learn_no_symbol():
    model, x = Reshaper(), torch.randn(3, 4)
    halves((3, 4))
    graph = trace(model, x)
    assert graph.facts.guards == ()
    assert (halves.cache_info().currsize, Reshaper.scale.cache_info().currsize) == (1, 0)
    for size in (3, 5):
        y = torch.randn(size, 4)
        assert torch.equal(graph(y), model(y))
    assert type(halves((5, 4))[0]) is int
