"""Ranks as threads of one process: each has a gloo backend of its own, and all share a store in memory. For unit tests."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from pipecompile.distributed import communicator as communicator_module
from pipecompile.distributed.communicator import Communicator


@dataclass(frozen=True)
class ThreadMesh:
    """The members of RankMesh that a communicator uses, for rank `index` of one pipeline of `size` ranks."""

    index: int
    size: int
    shared: Store
    timeout: float = 5.0
    replica_group: None = None
    shard_mesh: None = None
    shard_layout: None = None
    tensor_group: None = None
    groups: tuple[()] = ()
    device_type: str = "cpu"

    @property
    def group(self) -> object:
        return self

    @property
    def devices(self) -> tuple[torch.device, ...]:
        return (torch.device("cpu"),) * self.size

    @property
    def rank(self) -> int:
        return self.rank_of(self.index)

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(map(self.rank_of, range(self.size)))

    @property
    def copy(self) -> tuple[int, ...]:
        return self.members

    def rank_of(self, index: int) -> int:
        """Ranks are numbered otherwise than pipeline devices."""
        return 10 + index

    def store(self, number: int) -> Store:
        return PrefixStore(str(number), self.shared)


class ThreadCommunicator(Communicator):
    """A communicator whose backend is made from the shared store, without a process group."""

    def __init__(self, mesh: ThreadMesh) -> None:
        with patch.dict(communicator_module._CREATED, clear=True):  # every thread counts for itself
            super().__init__(mesh)  # type: ignore[arg-type]
        self.mesh = mesh

    def _open(self, *, is_new: bool) -> tuple[Any, int]:
        return backend(self.mesh.shared, self.mesh.index, self.mesh.size), 1


def backend(store: Store, rank: int, size: int) -> Any:
    return dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timedelta(seconds=20))


def run_ranks(size: int, function: Callable[[int, Store], Any]) -> list[Any]:
    """Return what `function(rank, store)` returns on each rank; raise the first exception."""
    store = HashStore()
    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(function, rank, store) for rank in range(size)]]


def run_communicators(size: int, function: Callable[[ThreadCommunicator], Any], timeout: float = 5.0) -> list[Any]:
    """Return what `function(communicator)` returns on each rank. Communicators are created one after the other."""
    store = HashStore()
    ranks = [ThreadCommunicator(ThreadMesh(index, size, store, timeout)) for index in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(function, rank) for rank in ranks]]
