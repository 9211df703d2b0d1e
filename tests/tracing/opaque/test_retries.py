"""A recording that fails is made again: with another piece kept whole, or with a comparison of sizes answered for the example."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipecompile.batching.call_inputs import flatten
from pipecompile.errors import TraceError
from pipecompile.tracing.fakes.data_sizes import DataSizeCompared
from pipecompile.tracing.opaque.attempts import OpaquePieces
from pipecompile.tracing.opaque.retries import record_with_retries


class Rows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * len(x[x > 0])


def retried(attempt: Any, kept: Any = ()) -> Any:
    model = nn.Sequential(nn.Linear(2, 2), Rows())
    return record_with_retries(model, flatten(model.forward, (torch.ones(4, 2),), {}, {}), attempt, kept)


def test_a_comparison_within_no_piece_is_answered_for_the_example() -> None:
    seen = []

    def attempt(opaque: OpaquePieces) -> str:
        seen.append(opaque.refuses_data_sizes)
        if opaque.refuses_data_sizes:
            raise DataSizeCompared
        return "recorded"

    assert retried(attempt) == "recorded"
    assert seen == [True, False]


def test_a_failure_that_no_piece_mends_is_raised() -> None:
    def attempt(opaque: OpaquePieces) -> str:
        raise TraceError(code="PC102")

    with pytest.raises(TraceError, match="PC102"):
        retried(attempt)


def test_a_recording_that_always_needs_another_piece_ends() -> None:
    def attempt(opaque: OpaquePieces) -> str:
        opaque.grow = lambda error: None  # type: ignore[method-assign]
        raise TraceError(code="PC102")

    with pytest.raises(TraceError, match="was recorded 64 times"):
        retried(attempt)
