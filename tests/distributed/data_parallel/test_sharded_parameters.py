"""Sharded parameters on a mesh of one rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from pipecompile.distributed.data_parallel import shard_buckets
from pipecompile.distributed.data_parallel.held_gradients import HeldGradients
from pipecompile.distributed.data_parallel.sharded_parameters import ShardedParameters
from pipecompile.errors import InputError


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


@pytest.fixture
def sharded(single_rank: None, model: nn.Module) -> ShardedParameters:
    alone = cast(Any, SimpleNamespace(require_process=lambda: None, current=lambda group: group))
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


def test_a_hook_on_a_shard_is_refused(sharded: ShardedParameters, model: nn.Linear) -> None:
    """It never ran, without a word, before."""
    model.weight.register_hook(lambda gradient: gradient / 2)
    sharded.refuse_hooks()
    handle = sharded.shard_of(model.weight).register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(InputError, match="a shard of a parameter has a hook on its gradient"):
        sharded.refuse_hooks()
    handle.remove()
    sharded.refuse_hooks()


def test_a_shard_is_a_dtensor_and_other_tensors_are_themselves(sharded: ShardedParameters, model: nn.Linear) -> None:
    assert bool(sharded)
    assert sharded.is_known
    assert isinstance(sharded.shard_of(model.weight), DTensor)
    other = torch.ones(1)
    assert sharded.shard_of(other) is other


def test_gradients_of_all_due_parameters_are_reduced_in_a_bucket_per_dtype(
    sharded: ShardedParameters, model: nn.Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sharded.whole():
        model(torch.ones(1, 3)).sum().backward()
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "to", lambda *_, **how: how["non_blocking"])  # the host does not wait
            (bucket,) = sharded.reduced(lambda weight: True, 0.5, HeldGradients())
        assert model.weight.grad is None
        bucket.settle(bucket.pending.wait())
    gradient = sharded.shard_of(model.weight).grad
    assert isinstance(gradient, DTensor)
    assert gradient.to_local().tolist() == [[0.5] * 3] * 2
    assert not sharded.reduced(lambda weight: False, 1.0, HeldGradients())


def test_a_parameter_without_a_gradient_on_any_rank_gets_none(sharded: ShardedParameters, model: nn.Linear) -> None:
    with sharded.whole():
        model.weight.sum().backward()
        (bucket,) = sharded.reduced(lambda weight: True, 1.0, HeldGradients())
        bucket.settle(bucket.pending.wait())
    assert sharded.shard_of(model.weight).grad is not None
    assert sharded.shard_of(model.bias).grad is None


def test_parameters_are_gathered_and_freed_by_stage(
    sharded: ShardedParameters, model: nn.Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    for least in (0, 1 << 20):  # each into its own memory, and all in one message
        monkeypatch.setattr(shard_buckets, "_LARGE", least)
        with sharded.by_stage():
            weight, bias = sharded.of({id(model.weight)}), sharded.apart_from({id(model.weight)})
            assert [one.whole is model.bias for one in bias] == [True]
            sharded.finish(sharded.start(weight + bias))
            output = model(torch.ones(1, 3)).sum()
            sharded.release(weight + bias)
            assert model.weight.isnan().all()
            sharded.finish(sharded.start(weight))
            output.backward()
            assert model.weight.grad.tolist() == [[1.0] * 3] * 2
        assert model.weight.isnan().all()
        model.zero_grad()


def test_what_users_freeze_is_frozen_before_it_is_gathered(sharded: ShardedParameters, model: nn.Linear) -> None:
    sharded.shard_of(model.bias).requires_grad_(False)
    with sharded.by_stage():
        assert not model.bias.requires_grad
        sharded.gather_rest()
        assert not sharded.is_by_stage
        assert not model.weight.isnan().any()
    assert model.weight.isnan().all()


def test_what_is_frozen_in_the_model_is_frozen_in_its_shard_and_trained_again(
    sharded: ShardedParameters, model: nn.Linear
) -> None:
    """The step trained it as before, without a word."""
    model.bias.requires_grad_(False)
    with sharded.whole():
        model(torch.ones(1, 3)).sum().backward()
        assert model.bias.grad is None
    assert not sharded.shard_of(model.bias).requires_grad
    model.requires_grad_(True)
    assert sharded.shard_of(model.bias).requires_grad
    sharded.shard_of(model.weight).requires_grad_(False)
    sharded.align()
    assert not model.weight.requires_grad


def test_without_a_mesh_nothing_is_sharded(model: nn.Linear) -> None:
    shards = ShardedParameters(None, cast(Any, None))
    assert shards.is_known
    shards.shard(model.parameters())
    assert not shards
    with shards.whole():
        assert shards.shard_of(model.weight) is model.weight
