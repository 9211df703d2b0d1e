"""Calls on a mini-batch: what ran is returned with the output, and a recording can be refused before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.batching.call_inputs import flatten
from pipecompile.driver.compile_cache import CompileCache
from pipecompile.driver.joined_calls import joined_call


@pytest.fixture
def pipe() -> pc.Pipeline:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    return pc.compile(model, 2, n_microbatches=2, cost="analytic", devices=["cpu"] * 2, batch_norm="each")


def cache_of(pipe: pc.Pipeline) -> CompileCache:
    return pipe._cache


def test_times_of_the_backward_are_added_when_it_runs(pipe: pc.Pipeline) -> None:
    output, (executable, spans) = joined_call(cache_of(pipe), flatten(pipe.model.forward, (torch.randn(6, 4),), {}, {}))
    assert output.shape == (6, 2)
    assert sorted(name for _, name, _, _ in spans) == ["0F0", "0F1", "1F0", "1F1"]
    output.sum().backward()
    assert len(spans) == 8 == sum(i.action is not None for row in executable.program.rows for i in row)


def test_without_gradients_there_is_no_backward_to_come(pipe: pc.Pipeline) -> None:
    with torch.no_grad():
        output, (_, spans) = joined_call(cache_of(pipe), flatten(pipe.model.forward, (torch.randn(6, 4),), {}, {}))
    assert not output.requires_grad
    assert len(spans) == 4


def test_a_refused_recording_runs_nothing(pipe: pc.Pipeline) -> None:
    def refuse(_: Any) -> None:
        raise LookupError

    before = pipe.model[1].running_mean.clone()
    with pytest.raises(LookupError):
        joined_call(cache_of(pipe), flatten(pipe.model.forward, (torch.randn(6, 4),), {}, {}), refuse)
    assert torch.equal(pipe.model[1].running_mean, before)
