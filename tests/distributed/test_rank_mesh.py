from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import pipecompile as pc
from pipecompile.distributed.rank_mesh import RankMesh, _along, _copies_of
from pipecompile.errors import InputError, ScheduleError

pytestmark = pytest.mark.usefixtures("single_rank")


def mesh_of(*names: str) -> RankMesh:
    return RankMesh.of(init_device_mesh("cpu", (1,) * len(names), mesh_dim_names=names))


def test_without_a_mesh_all_ranks_run_the_pipeline() -> None:
    ranks = RankMesh.of(None)
    assert (ranks.group, ranks.members) == (dist.group.WORLD, (0,))


def test_the_device_of_a_mesh_is_the_one_it_was_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    assert replace(mesh_of("pp"), device_type="cuda").devices == (torch.device("cuda:3"),)
    assert mesh_of("pp").device_type == "cpu"


@pytest.mark.parametrize(
    ("config", "has_gpu", "kind"),
    [("cuda:nccl", True, "cuda"), ("cpu:gloo,cuda:nccl", True, "cuda"), ("cpu:gloo,cuda:nccl", False, "cpu"), ("cpu:gloo,cuda:gloo", True, "cpu")],
)  # fmt: skip
def test_all_ranks_use_gpus_where_they_have_nccl(
    config: str, has_gpu: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the backend of the default `init_process_group()` was "undefined", and the pipeline ran on the CPU beside idle GPUs."""
    monkeypatch.setattr(dist, "get_backend_config", lambda _: config)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    assert RankMesh.of(None).device_type == kind


def test_the_ranks_of_a_mesh() -> None:
    ranks = mesh_of("pp")
    assert (ranks.index, ranks.size, ranks.members, ranks.rank) == (0, 1, (0,), 0)
    assert ranks.rank_of(0) == 0
    assert ranks.devices == (torch.device("cpu"),)
    assert ranks.replica_group is ranks.shard_mesh is ranks.tensor_group is None


@pytest.mark.parametrize("schedule", ["1f1b", pc.build_schedule("1f1b", 2, 4)])
def test_more_stages_than_ranks_are_no_reason_to_leave_the_ranks(schedule: Any) -> None:
    """Before, the error said devices=, with which each rank would have trained a model of its own."""
    with pytest.raises(ScheduleError) as raised:
        pc.compile(
            nn.Linear(2, 2), 2 if schedule == "1f1b" else 1, schedule=schedule, mesh=init_device_mesh("cpu", (1,))
        )
    assert "devices=" not in str(raised.value)
    assert "of the pipeline, of which there are 1" in raised.value.why
    assert raised.value.hint.startswith("n_stages=1, one per rank of the pipeline; or schedule=")


def test_other_errors_of_a_schedule_are_as_they_are() -> None:
    with pytest.raises(ScheduleError, match="schedule='1f1' is not known"), RankMesh.of(None).as_devices():
        pc.compile(nn.Linear(2, 2), 1, schedule="1f1", devices=["cpu"])


def test_a_mesh_of_one_dimension_needs_no_name() -> None:
    assert RankMesh.of(init_device_mesh("cpu", (1,))).size == 1


def test_dimensions_of_one_rank_make_no_replicas() -> None:
    ranks = mesh_of("dp", "dp_shard", "pp")
    assert ranks.replica_group is ranks.shard_mesh is None


def test_ranks_along_tp_have_a_group() -> None:
    group = mesh_of("pp", "tp").tensor_group
    assert group is not None
    assert dist.get_world_size(group) == 1


def test_where_torch_cannot_reorder_dimensions_the_order_is_told() -> None:
    class InOrder:
        def __getitem__(self, names: tuple[str, ...]) -> None:
            raise KeyError("mesh_dim_names are not in order")

    with pytest.raises(InputError, match=r"cannot take the dimensions \('dp', 'dp_shard'\)") as caught:
        _along(cast(DeviceMesh, InOrder()), ("dp_shard", "dp"))
    assert "('pp', 'dp', 'dp_shard')" in caught.value.hint


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("copies", "pp"), r"the dimensions of the mesh are \('copies', 'pp'\)"),
        (("dp", "tp"), "init_device_mesh"),
    ],
)
def test_dimensions_that_a_pipeline_does_not_have_are_refused(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        mesh_of(*names)


def test_a_mesh_and_devices_exclude_each_other() -> None:
    with pytest.raises(InputError, match="both devices= and mesh= are set"):
        pc.compile(nn.Sequential(nn.Linear(2, 2)), 1, mesh=init_device_mesh("cpu", (1,)), devices=["cpu"])


def test_the_timeout_is_that_of_the_process_group() -> None:
    assert mesh_of("pp").timeout == 20.0


def test_every_communicator_and_every_start_has_a_store_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = mesh_of("pp")
    ranks.store(1).set("key", "first")
    assert not ranks.store(2).check(["key"])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not ranks.store(1).check(["key"])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert ranks.store(1).get("key") == b"first"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    ranks.store(1).set("key", "of the first agent")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")  # a node has joined: the second agent has restarted nothing
    assert ranks.store(1).get("key") == b"of the first agent"


@pytest.mark.parametrize(
    ("names", "shape", "copies"),
    [
        (("pp",), (4,), [(0, 1, 2, 3)]),
        (("dp", "pp"), (2, 2), [(0, 1), (2, 3)]),
        (("pp", "dp"), (2, 2), [(0, 2), (1, 3)]),
        (("dp", "pp", "tp"), (2, 1, 2), [(0, 1), (2, 3)]),
        (("dp", "dp_shard", "pp"), (2, 2, 1), [(0,), (1,), (2,), (3,)]),
    ],
)
def test_the_ranks_of_each_copy(names: tuple[str, ...], shape: tuple[int, ...], copies: list[tuple[int, ...]]) -> None:
    mesh: Any = SimpleNamespace(mesh=torch.arange(4).view(shape), ndim=len(shape))
    assert _copies_of(mesh, names) == tuple(copies)


def test_the_ranks_of_the_copies_that_are_left() -> None:
    ranks = replace(mesh_of("pp"), copies=((0, 1), (2, 3), (4, 5)), left=(0, 1, 2), members=tuple(range(6)))
    after = ranks.of_copies((0, 2))
    assert (after.members, after.left, after.number_of_copy, after.replicas) == ((0, 1, 4, 5), (0, 2), 0, (0, 4))
