from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import pipecompile as pc
from pipecompile.tracing import trace


class Body(nn.Module):
    def __init__(self, body) -> None:
        super().__init__()
        self.body = body

    def forward(self, x):
        return self.body(x)


def guards(body, size: int) -> list[str]:
    return sorted(str(guard) for guard in trace(Body(body), torch.randn(size, 4, 3)).facts.guards)


@pytest.mark.parametrize(
    "body, size, expected",
    [
        (lambda x: x * 2 if x.shape[0] > 2 else x, 4, ["batch_size > 2"]),
        (lambda x: x * 2 if x.shape[0] > 3 else x, 2, ["batch_size <= 3"]),
        (lambda x: x if torch.conv1d(x, torch.ones(4, 4, 2)).shape[0] == 1 else x * 2, 4, ["Ne(batch_size, 1)"]),
        (lambda x: x.squeeze(), 4, ["Ne(batch_size, 1)"]),
        (lambda x: torch.stack([row * 2 for row in x]), 3, ["Eq(batch_size, 3)"]),
        (lambda x: x * int(x.shape[0]), 3, []),
        (lambda x: x * sum(map(int, x.shape)), 3, ["Eq(batch_size, 3)"]),
        (lambda x: x if x.shape[0] == 1 else x * 2, 1, ["Eq(batch_size, 1)"]),
        (lambda x: x if x.shape[1] == 4 else x * 2, 4, []),
        (lambda x: torch.conv1d(x, torch.ones(4, 4, 2)).flatten(1) @ torch.ones(8, 2), 4, []),
        (lambda x: x.transpose(0, 1).reshape(4, -1).sum(1), 4, []),
    ],
)
def test_a_guard_for_every_branch_on_the_batch_size_and_no_other(body, size, expected):
    assert guards(body, size) == expected


def test_guards_know_where_they_hold():
    (guard,) = trace(Body(lambda x: x * 2 if x.shape[0] % 2 == 0 else x), torch.randn(4, 4, 3)).facts.guards
    assert [guard.holds(size) for size in (1, 2, 3, 8)] == [False, True, False, True]


def test_a_batch_of_one_is_recorded_like_any_other_unless_the_model_asks():
    free = trace(Body(lambda x: x.view(x.shape[0], -1)), torch.randn(1, 4, 3))
    assert free.facts.batch_size is None
    assert free(torch.randn(5, 4, 3)).shape == (5, 12)
    fixed = trace(Body(lambda x: x[0] if x.shape[0] == 1 else x), torch.randn(1, 4, 3))
    assert fixed.facts.batch_size == 1
    assert fixed(torch.randn(1, 4, 3)).shape == (4, 3)


@pytest.mark.parametrize(
    "size_of",
    [
        lambda n: n * 7 // 2,
        lambda n: (n + 1) * (n - 1) % 5 + 1,
        lambda n: max(n, 3) - min(n, 2) + 1,
        lambda n: abs(-n) ** 2,
        lambda n: round(n / 2) + 1,
        lambda n: torch.Size([n, 2]).numel(),
    ],
)
def test_sizes_are_computed_anew(size_of):
    graph = trace(Body(lambda x: x.sum() + torch.ones(size_of(x.shape[0]))), torch.randn(4, 4, 3))
    if not graph.facts.guards:
        assert [graph(torch.randn(n, 4, 3)).shape[0] for n in (1, 2, 9)] == [size_of(n) for n in (1, 2, 9)]
    assert graph(torch.randn(4, 4, 3)).shape[0] == size_of(4)


def test_a_recording_that_is_dropped_leaves_no_analysis_of_sizes() -> None:
    """Torch's caches on the class kept one, and its symbols, of every recording."""

    def alive() -> int:
        gc.collect()
        return sum(isinstance(one, ShapeEnv) for one in gc.get_objects())

    numbers = []
    for _ in range(4):
        pc.trace(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), torch.randn(5, 3))
        numbers.append(alive())
    assert numbers[1:] == numbers[1:2] * 3  # what all recordings share is of the first
