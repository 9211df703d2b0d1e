"""Offsets of packed sequences are recognised by their values, and not cut like samples without a warning."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.batching.call_inputs import flatten
from pipecompile.batching.offsets import offset_names


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, tokens: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(tokens) + offsets[:, None])


@pytest.mark.parametrize(
    ("offsets", "found"),
    [([0, 2, 3, 4], True), ([0, 2, 2, 4], True), ([1, 2, 3, 4], False), ([0, 3, 2, 4], False), ([0, 1, 2, 9], False),
     ([0.0, 2.0, 3.0, 4.0], False), ([0, 0, 0, 0], False)],
)  # fmt: skip
def test_offsets_are_recognised(offsets: list[float], found: bool) -> None:
    inputs = flatten(Packed().forward, (torch.zeros(4, 3), torch.tensor(offsets)), {})
    assert offset_names(inputs) == (["offsets"] if found else [])
    shared = flatten(Packed().forward, (torch.zeros(4, 3), torch.tensor(offsets)), {}, {"offsets": None})
    assert offset_names(shared) == []


def test_offsets_that_are_cut_come_with_one_warning() -> None:
    def piped(offsets: list[int], count: int) -> pc.Pipeline:
        pipe = pc.compile(Packed(), 2, n_microbatches=count, loss_fn=torch.Tensor.mean, cost="analytic")
        for _ in range(2):
            pipe.step(torch.zeros(4, 3), torch.tensor(offsets))
        return pipe

    with pytest.warns(pc.RecordingWarning, match="offsets looks like offsets of packed sequences") as caught:
        piped([0, 1, 3, 4], 2)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", pc.RecordingWarning)
        piped([0, 1, 3, 4], 1)
        piped([3, 1, 0, 2], 2)
