"""Parts and wholes of sharded tensors, on a mesh of one rank."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from pipecompile.torch_private.dtensors import fitted, gradient_of, like, local, part_of, whole_of

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


def test_a_missing_gradient_is_zeros() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert torch.equal(gradient_of(parameter), torch.zeros(2))
    parameter.grad = torch.ones(2)
    assert gradient_of(parameter) is parameter.grad


def test_a_state_is_fitted_to_how_the_model_is_sharded(mesh: DeviceMesh) -> None:
    whole, sharded = torch.arange(4.0), distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    state = fitted(OrderedDict(a=whole, b=sharded, c=whole), {"a": sharded, "b": whole, "c": whole})
    assert isinstance(state["a"], DTensor)
    assert type(state["b"]) is torch.Tensor
    assert state["c"] is whole
