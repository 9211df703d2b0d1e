"""Random inputs are of many kinds, and include the numbers that calls mention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.graph.colocation import compute_nodes
from pipecompile.graph.random_inputs import random_values, special_numbers


class Model(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x.clamp(max=7.5), x.argmax(1), ignore_index=-7)


def test_numbers_of_the_calls_are_special() -> None:
    graph = pc.trace(Model(), torch.randn(4, 3))
    assert {7.5, -7, -100} <= set(special_numbers(compute_nodes(graph), graph))


def test_trials_differ_in_kind() -> None:
    torch.manual_seed(0)
    assert set(random_values([200], torch.int64, 0, [-7]).tolist()) == {0, 1, -7}
    assert set(random_values([200], torch.int64, 2, [-7]).tolist()) == {0, 1}
    fractions, sparse = (random_values([500], torch.float32, trial, []) for trial in (1, 3))
    assert fractions.min() > 0
    assert fractions.max() < 1
    assert (sparse == 0).float().mean() > 0.8
    shares = [random_values([500], torch.bool, trial, []).float().mean().item() for trial in range(3)]
    assert shares[1] < shares[0] < shares[2]
