"""Stores, backends and meshes of process groups, with one rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from threading import Event
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from pipecompile.torch_private import process_groups
from pipecompile.torch_private.process_groups import (
    abort_nccl,
    close_connections,
    default_store,
    device_types,
    flattened,
    gloo_backend,
    gloo_group,
    has_gloo_alone,
    nccl_backend,
    timeout_of,
    without_timeout,
)

pytestmark = pytest.mark.smoke


@pytest.fixture(autouse=True)
def world(tmp_path: Path) -> Iterator[None]:
    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1, timeout=timedelta(seconds=7))
    yield
    dist.destroy_process_group()


def test_the_default_store_keeps_values() -> None:
    default_store().set("key", "value")
    assert default_store().get("key") == b"value"


def test_the_timeout_is_that_of_the_process_group() -> None:
    assert dist.group.WORLD is not None
    assert timeout_of(dist.group.WORLD) == timedelta(seconds=7)


def test_a_mesh_of_two_dimensions_is_flattened() -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "fsdp"))
    assert flattened(mesh, "all", [0]).mesh.tolist() == [0]
    assert torch.distributed.get_world_size(flattened(mesh, "all", [0]).get_group()) == 1


def test_a_group_without_cpu_tensors_has_a_timeout(tmp_path: Path) -> None:
    """As after `init_process_group("nccl")`: before, the timeout was asked of a backend for CPU tensors."""
    dist.destroy_process_group()
    dist.init_process_group(
        "cuda:gloo", init_method=f"file://{tmp_path}/other", rank=0, world_size=1, timeout=timedelta(seconds=8)
    )
    assert dist.group.WORLD is not None
    assert device_types(dist.group.WORLD) == ("cuda",)
    assert timeout_of(dist.group.WORLD) == timedelta(seconds=8)


def test_a_backend_outside_of_all_groups_sends_to_itself() -> None:
    backend = gloo_backend(dist.HashStore(), 0, 1, timedelta(seconds=7))
    assert (backend.rank(), backend.size()) == (0, 1)
    without_timeout(backend)


def test_a_group_outside_of_all_groups_has_the_devices_of_another() -> None:
    assert dist.group.WORLD is not None
    assert has_gloo_alone(dist.group.WORLD)
    kinds = device_types(dist.group.WORLD)
    group = gloo_group(gloo_backend(dist.HashStore(), 0, 1, timedelta(seconds=7)), dist.HashStore(), kinds)
    dist.all_reduce(value := torch.ones(2), group=group)
    assert value.tolist() == [1.0, 1.0]
    assert sorted(device_types(group)) == sorted(kinds)


def test_communicators_of_nccl_are_aborted_and_those_of_gloo_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_groups, "_ABORT", 0.05)
    ended, never = [], Event()

    class Nccl:
        def abort(self) -> None:
            ended.append(self)
            never.wait(5)  # ncclCommAbort may hang

    nccl, gloo = Nccl(), gloo_backend(dist.HashStore(), 0, 1, timedelta(seconds=7))
    backends = {"cpu": gloo, "cuda": nccl, "other": nccl}
    group: Any = SimpleNamespace(_device_types=[*backends], _get_backend=backends.get)
    start = monotonic()
    abort_nccl(group)
    never.set()
    assert ended == [nccl]
    assert monotonic() - start < 4
    dist.all_reduce(torch.ones(1), group=gloo_group(gloo, dist.HashStore(), ["cpu"]))


@pytest.mark.skipif(not dist.is_nccl_available(), reason="torch without NCCL")
def test_an_nccl_backend_has_the_timeout_and_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Backend:
        Options = dist.ProcessGroupNCCL.Options

        def __init__(self, store: object, rank: int, size: int, options: Any) -> None:
            self.given = rank, size, options._timeout, options.group_name
            handling.append(os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"])

    handling = list[str]()
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Backend)
    given = 1, 2, timedelta(days=30), "link"
    for before in (None, "1"):
        with monkeypatch.context() as patch:
            if before is not None:
                patch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", before)
            assert nccl_backend(dist.HashStore(), *given).given == given
            assert os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == before
    assert handling == ["0"] * 2  # torch would end the process a minute after a peer is gone


def test_all_connections_are_closed_though_that_to_one_peer_is_gone() -> None:
    """A rank waited for ever for one that stood still, if the rank after it had closed its connections before."""
    store, limit = dist.HashStore(), timedelta(seconds=20)
    with ThreadPoolExecutor(3) as pool:
        first, second, _ = pool.map(lambda rank: gloo_backend(store, rank, 3, limit), range(3))
        part = torch.empty(1)
        close_connections(second, 9)
        with pytest.raises(RuntimeError):  # until the first has noticed
            first.recv([part], 1, 8).wait(limit)
        waiting = first.recv([part], 2, 7)
        start = monotonic()
        ended = pool.submit(lambda: pytest.raises(RuntimeError, waiting.wait, limit))
        close_connections(first, 9)
        ended.result()
    assert monotonic() - start < 10
