"""Deferred BatchNorm layers of several recordings merge their statistics."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipecompile.errors import InputError
from pipecompile.runtime.cells.deferred_batchnorm import DeferredBatchNorm, DeferredNorm, DeferredNorms
from pipecompile.runtime.cells.joined_norms import joined_norms


def test_statistics_of_all_recordings_are_merged_once() -> None:
    layer, values = nn.BatchNorm1d(3), torch.randn(9, 3)
    recordings = [DeferredNorm(layer), DeferredNorm(layer)]
    layers = [DeferredBatchNorm(norm.new_call()) for norm in recordings]
    norms = joined_norms([DeferredNorms((norm,)) for norm in recordings])
    norms.begin()
    layers[0](values[:4])
    layers[1](values[4:])
    norms.settle()
    torch.testing.assert_close(layer.running_mean, 0.1 * values.mean(0))
    torch.testing.assert_close(layer.running_var, 0.9 + 0.1 * values.var(0))
    assert layer.num_batches_tracked == 1
    own = DeferredNorms((recordings[1],))  # a recording that runs alone afterwards
    own.begin()
    layers[1](values)
    own.settle()
    assert layer.num_batches_tracked == 2


def test_a_run_that_fails_unlinks_the_recordings() -> None:
    layer = nn.BatchNorm1d(3)
    recordings = [DeferredNorm(layer), DeferredNorm(layer)]
    calls = [norm.new_call() for norm in recordings]
    norms = joined_norms([DeferredNorms((norm,)) for norm in recordings])
    norms.begin()
    assert calls[1].receiver is calls[0]
    norms.forget()
    assert calls[1].receiver is None


def test_layers_that_run_differently_often_are_refused() -> None:
    layer = nn.BatchNorm1d(3)
    recordings = [DeferredNorm(layer), DeferredNorm(layer)]
    for norm, times in zip(recordings, (1, 2), strict=True):
        for _ in range(times):
            norm.new_call()
    with pytest.raises(InputError, match="runs 1 times in one micro-batch and 2 times in another"):
        joined_norms([DeferredNorms((norm,)) for norm in recordings])
