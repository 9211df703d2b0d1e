"""The inputs in the lines of a plan for a cluster."""

from __future__ import annotations

import torch
from torch import nn

from pipecompile.layouts.call_text import input_words


class Named(nn.Module):
    def forward(self, ids: torch.Tensor, causal: bool, *more: torch.Tensor) -> torch.Tensor:
        return ids


def test_inputs_have_the_names_of_the_parameters() -> None:
    x = torch.empty(2)
    assert input_words(Named(), (x,), None, None) == "example_args=(x,)"
    assert input_words(Named(), (x, True, x), {}, None) == "example_args=(ids, True, x2)"
    assert input_words(Named(), (), {"ids": x, "causal": False}, None) == 'example_kwargs={"ids": ids, "causal": False}'


def test_batch_dims_are_repeated() -> None:
    words = input_words(Named(), (torch.empty(2),), None, {"ids": 1, "causal": None, "more": list})
    assert words.endswith('batch_dims={"ids": 1, "causal": None, "more": list}')
