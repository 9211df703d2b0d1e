"""Parts and wholes of sharded tensors, on a mesh of one rank."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from pipecompile.torch_private.dtensors import (
    cut_further,
    fitted,
    gradient_of,
    is_redistribution,
    like,
    local,
    part_of,
    set_part,
    waited,
    whole_of,
)

pytestmark = pytest.mark.smoke


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_plain_tensor_is_its_own_part_and_whole() -> None:
    x = torch.ones(4)
    assert local(x) is x
    assert whole_of(x) is x
    assert like(torch.ones(2, 2), x).shape == (2, 2)


def test_a_sharded_tensor_has_a_part_and_a_whole(mesh: DeviceMesh) -> None:
    x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    assert type(local(x)) is type(part_of(x)) is torch.Tensor
    assert torch.equal(whole_of(x), torch.arange(4.0))
    made = like(x, torch.ones(4))
    assert isinstance(made, DTensor)
    assert made.placements == x.placements


def test_a_tensor_gets_other_memory(mesh: DeviceMesh) -> None:
    for tensor in (nn.Parameter(torch.ones(4)), nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))):
        own = torch.arange(4.0)
        set_part(tensor, own)
        assert part_of(tensor).data_ptr() == own.data_ptr()
        assert torch.equal(whole_of(tensor), own)


def test_parts_are_cut_further_within_the_dimensions_that_cut_them(mesh: DeviceMesh) -> None:
    del mesh
    own = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("dp", "dp_shard", "tp"))
    columns = distribute_tensor(torch.ones(4, 2), own["tp"], [Shard(1)])
    found = cut_further(columns, part_of(columns), own)
    assert found.placements == (Replicate(), Shard(0), Shard(1))
    assert found.shape == (4, 2)
    assert cut_further(torch.ones(4), torch.ones(4), own["dp_shard", "tp"]).placements == (Shard(0), Replicate())
    assert cut_further(torch.ones(4), torch.ones(4), own["dp", "dp_shard"]).placements == (Replicate(), Shard(0))
    assert cut_further(torch.tensor(1.0), torch.tensor(1.0), own["dp_shard"]).placements == (Replicate(),)


def test_a_missing_gradient_is_zeros() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert torch.equal(gradient_of(parameter), torch.zeros(2))
    parameter.grad = torch.ones(2)
    assert gradient_of(parameter) is parameter.grad


def test_a_state_is_fitted_to_how_the_model_is_sharded(mesh: DeviceMesh) -> None:
    whole, sharded = torch.arange(4.0), distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    copies = distribute_tensor(torch.arange(4.0), mesh, [Replicate()])
    state = fitted(
        OrderedDict(a=whole, b=sharded, c=whole, d=sharded), {"a": sharded, "b": whole, "c": whole, "d": copies}
    )
    assert state["d"].placements == copies.placements
    assert isinstance(state["a"], DTensor)
    assert type(state["b"]) is torch.Tensor
    assert state["c"] is whole


@pytest.mark.usefixtures("mesh")
def test_the_result_of_a_collective_under_way_becomes_a_plain_tensor() -> None:
    result = all_reduce(torch.ones(3), "sum", dist.group.WORLD)
    assert type(result) is not torch.Tensor
    assert type(waited(result)) is torch.Tensor
    assert torch.equal(waited(result), torch.ones(3))
    assert waited(x := torch.ones(2)) is x


def test_functions_between_local_tensors_and_dtensors_are_recognised(mesh: DeviceMesh) -> None:
    x = DTensor.from_local(torch.ones(4, requires_grad=True), mesh).redistribute(placements=[Replicate()]).to_local()
    assert is_redistribution(x.grad_fn._forward_cls)
    assert not is_redistribution(torch.autograd.Function)
    assert not is_redistribution(None)
