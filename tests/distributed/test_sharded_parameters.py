"""Shards of one of two ranks, whose other rank has the same values; and a mesh of one rank."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from pipecompile.distributed.sharded_parameters import ShardedParameter, ShardedParameters, _padded, _rows


def test_rows_are_cut_as_torch_chunks_them() -> None:
    whole = torch.arange(10.0).view(5, 2)
    assert [len(_rows(whole, index, 4)) for index in range(4)] == [2, 2, 1, 0]
    assert torch.equal(torch.cat([_rows(whole, index, 4) for index in range(4)]), whole)
    assert _rows(torch.tensor(3.0), 1, 2).item() == 3.0


def test_padding_is_at_the_end() -> None:
    assert _padded(torch.ones(1, 2), 4).tolist() == [1.0, 1.0, 0.0, 0.0]


def half(shape: tuple[int, ...], index: int = 0) -> ShardedParameter:
    """The part of rank `index` of two; its shard is a plain tensor."""
    whole = nn.Parameter(torch.arange(float(torch.Size(shape).numel())).view(shape))
    rows = _rows(whole.data, index, 2).clone()
    width = -(-shape[0] // 2) * torch.Size(shape[1:]).numel() if shape else 1
    return ShardedParameter(whole, nn.Parameter(rows), whole.stride(), width)


def test_a_freed_parameter_is_nan_and_keeps_its_shape() -> None:
    parameter = half((3, 2))
    parameter.free(0, 2)
    assert parameter.whole.shape == (3, 2)
    assert parameter.whole.isnan().all()
    assert parameter.whole.untyped_storage().nbytes() == 4


def test_a_gathered_parameter_has_the_values_of_both_ranks_and_its_strides() -> None:
    parameter = half((3, 2))
    parameter.stride = (1, 3)
    parameter.free(0, 2)
    parameter.gather(torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 0.0, 0.0]))  # two numbers of padding
    assert parameter.whole.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert parameter.whole.stride() == (1, 3)


def test_rows_that_a_forward_writes_are_kept() -> None:
    parameter = half((3, 2), index=1)
    parameter.gather(torch.arange(8.0))
    with torch.no_grad():
        parameter.whole += 10
    parameter.free(1, 2)
    assert parameter.local.tolist() == [[14.0, 15.0]]


def test_the_rows_of_a_gradient_are_those_of_the_ranks() -> None:
    parameter = half((3, 2))
    assert parameter.gradient_rows(2).tolist() == [[0.0] * 4] * 2
    parameter.whole.grad = torch.arange(6.0).view(3, 2)
    assert parameter.gradient_rows(2).tolist() == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 0.0, 0.0]]
    scalar = half(())
    scalar.whole.grad = torch.tensor(2.0)
    assert scalar.gradient_rows(2).tolist() == [[2.0], [2.0]]


def test_gradients_of_a_shard_are_added_up() -> None:
    parameter = half((3, 2), index=1)
    for _ in range(2):
        parameter.add_gradient(torch.tensor([1.0, 2.0, 0.0, 0.0]))
    assert parameter.shard.grad is not None
    assert parameter.shard.grad.tolist() == [[2.0, 4.0]]


# -- on a mesh of one rank ---------------------------------------------------------------------------------------------


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


@pytest.fixture
def sharded(single_rank: None, model: nn.Module) -> ShardedParameters:
    alone = cast(Any, SimpleNamespace(starting=nullcontext))
    shards = ShardedParameters(init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",)), alone)
    assert not shards.is_known
    shards.shard([*model.parameters(), nn.Parameter(torch.tensor([1]), requires_grad=False)])
    return shards


def test_parameters_are_whole_in_a_context_only(sharded: ShardedParameters, model: nn.Linear) -> None:
    values = {name: value.full_tensor() for name, value in sharded.replace(model.state_dict(), dict(model.named_parameters())).items()}  # fmt: skip
    assert model.weight.isnan().all()
    with sharded.whole():
        with sharded.whole():
            assert torch.equal(model.weight, values["weight"])
        assert torch.equal(model.bias, values["bias"])
    assert model.bias.isnan().all()


def test_a_shard_is_a_dtensor_and_other_tensors_are_themselves(sharded: ShardedParameters, model: nn.Linear) -> None:
    assert bool(sharded)
    assert sharded.is_known
    assert isinstance(sharded.shard_of(model.weight), DTensor)
    other = torch.ones(1)
    assert sharded.shard_of(other) is other


def test_gradients_of_all_due_parameters_are_reduced_in_a_bucket_per_dtype(
    sharded: ShardedParameters, model: nn.Linear
) -> None:
    with sharded.whole():
        model(torch.ones(1, 3)).sum().backward()
        (bucket,) = sharded.reduced(lambda weight: True, 0.5)
        assert model.weight.grad is None
        bucket.settle(bucket.pending.wait())
    gradient = sharded.shard_of(model.weight).grad
    assert isinstance(gradient, DTensor)
    assert gradient.to_local().tolist() == [[0.5] * 3] * 2
    assert not sharded.reduced(lambda weight: False, 1.0)


def test_a_parameter_without_a_gradient_on_any_rank_gets_none(sharded: ShardedParameters, model: nn.Linear) -> None:
    with sharded.whole():
        model.weight.sum().backward()
        (bucket,) = sharded.reduced(lambda weight: True, 1.0)
        bucket.settle(bucket.pending.wait())
    assert sharded.shard_of(model.weight).grad is not None
    assert sharded.shard_of(model.bias).grad is None


def test_without_a_mesh_nothing_is_sharded(model: nn.Linear) -> None:
    shards = ShardedParameters(None, cast(Any, None))
    assert shards.is_known
    shards.shard(model.parameters())
    assert not shards
    with shards.whole():
        assert shards.shard_of(model.weight) is model.weight
