"""Messages of gradients of sharded parameters, on a mesh of one rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from pipecompile.distributed.data_parallel import shard_buckets
from pipecompile.distributed.data_parallel.held_gradients import HeldGradients
from pipecompile.distributed.data_parallel.sharded_parameters import ShardedParameters


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize("shares", [False, True])
def test_large_gradients_are_reduced_in_their_own_memory(shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of each was the peak of a step that frees stages. Memory that others share is copied: they may be on their way to a rank."""
    monkeypatch.setattr(shard_buckets, "_LARGE", 0)
    alone = cast(Any, SimpleNamespace(require_process=lambda: None, current=lambda group: group))
    sharded, model = (
        ShardedParameters(init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",)), alone),
        nn.Linear(3, 2),
    )
    sharded.shard(model.parameters())
    with sharded.whole():
        model.weight.sum().backward()
        memory, other = model.weight.grad.data_ptr(), model.weight.grad.view(-1) if shares else None
        counts, weight, bias = sharded.reduced(lambda weight: True, 0.5, HeldGradients())
        assert (weight.pending.result.data_ptr() == memory) is not shares
        assert other is None or other.tolist() == [1.0] * 6
        for bucket in (counts, weight, bias):
            bucket.settle(bucket.pending.wait())
    gradient = sharded.shard_of(model.weight).grad
    assert isinstance(gradient, torch.Tensor)
    assert gradient.to_local().tolist() == [[0.5] * 3] * 2
    assert sharded.shard_of(model.bias).grad is None
