"""Process groups: the default store, the backend's timeout, backends outside of any group, and flattened meshes."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store, _get_default_store, _world

__all__ = [
    "abort_nccl",
    "close_connections",
    "default_store",
    "device_types",
    "flattened",
    "gloo_backend",
    "gloo_group",
    "group_of_some",
    "has_gloo_alone",
    "limit_timeout",
    "nccl_backend",
    "timeout_of",
    "without_timeout",
]

_ABORT = 10.0
"""Seconds in which the communicators of a group are to be aborted. `ncclCommAbort` itself may hang."""

_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"

_MADE: Counter[tuple[int, ...]] = Counter()
"""Number of groups of some of the ranks that this process has made, per ranks: these make them in the same order."""


def default_store() -> Store:
    """Return the store that `init_process_group` made or was given. 2.11."""
    return _get_default_store()


def gloo_backend(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a gloo backend outside of any process group; the ranks meet in `store`. 2.11."""
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def close_connections(backend: Any, tag: int) -> None:
    """Close the connections of a gloo backend: it closes all of them when one receive times out, of a tag that is never sent. 2.11.

    A receive from a peer whose connection is gone fails at once and closes no other: each peer is tried.
    """
    part = torch.empty(1, dtype=torch.uint8, device="cpu")
    for peer in range(backend.size()):
        with suppress(RuntimeError):
            if peer != backend.rank():
                backend.recv([part], peer, tag).wait(timedelta(milliseconds=1))


def without_timeout(backend: Any) -> None:
    """Let later collectives and messages of a backend wait for a month. 2.11."""
    backend._set_default_timeout(timedelta(days=30))


def gloo_group(backend: Any, store: Store, kinds: Iterable[str]) -> dist.ProcessGroup:
    """Return a process group with one gloo backend for devices of these types, outside of torch's list of groups. 2.11."""
    group = dist.ProcessGroup(store, backend.rank(), backend.size())
    for kind in kinds:
        group._register_backend(torch.device(kind), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def has_gloo_alone(group: dist.ProcessGroup) -> bool:
    """Return whether all backends of a group are gloo. 2.11."""
    backends = (group._get_backend(device) for device in group._device_types)
    return all(isinstance(backend, dist.ProcessGroupGloo) for backend in backends)


def nccl_backend(store: Store, rank: int, size: int, timeout: timedelta, name: str) -> Any:
    """Return an NCCL backend outside of any process group: communicators of its own. The ranks meet in `store`. 2.11.

    The flight recorder notes its calls under `name`. Torch does not end the process for an error of it: by default it does so a minute
    after a peer is gone, whatever was raised and caught meanwhile. A backend reads the variable for that when it is made.
    """
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout, options.group_name = timeout, name
    before = os.environ.get(_ERROR_HANDLING)
    os.environ[_ERROR_HANDLING] = "0"
    try:
        return dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        del os.environ[_ERROR_HANDLING]
        os.environ |= {} if before is None else {_ERROR_HANDLING: before}


def abort_nccl(group: dist.ProcessGroup) -> None:
    """End what is under way on the communicators of NCCL of a group, which cannot be used any more; wait some seconds for that. 2.11."""
    backends = {id(backend): backend for backend in map(group._get_backend, group._device_types)}
    for backend in backends.values():
        if not isinstance(backend, dist.ProcessGroupGloo) and hasattr(backend, "abort"):
            thread = Thread(target=_aborted, args=(backend,), name="pipecompile-abort", daemon=True)
            thread.start()
            thread.join(_ABORT)


def _aborted(backend: Any) -> None:
    with suppress(RuntimeError):
        backend.abort()


def device_types(group: dist.ProcessGroup) -> tuple[str, ...]:
    """Return the types of the devices whose tensors the group can send: ("cuda",) after `init_process_group("nccl")`. 2.11."""
    return tuple(device.type for device in group._device_types)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the `timeout` of `init_process_group`, as any backend of the group has it. 2.11."""
    types = device_types(group)
    backend = group._get_backend(torch.device("cpu" if "cpu" in types else types[0]))
    timeout: timedelta = backend.options._timeout
    return timeout


def limit_timeout(group: dist.ProcessGroup, limit: timedelta) -> None:
    """Let later collectives of a group with gloo wait no longer than `limit`. 2.11."""
    for device in group._device_types:
        backend = group._get_backend(device)
        if isinstance(backend, dist.ProcessGroupGloo) and backend.options._timeout > limit:
            backend._set_default_timeout(limit)


def flattened(mesh: DeviceMesh, name: str, ranks: Sequence[int]) -> DeviceMesh:
    """Return a mesh of one dimension, called `name`, over all ranks of `mesh`. `ranks` call this together. 2.11."""
    with _numbered_apart(ranks):
        return mesh._flatten(name)


def group_of_some(ranks: Sequence[int], timeout: timedelta) -> dist.ProcessGroup:
    """Return a process group with gloo of some of the ranks, which call this together, and others do not. 2.11.

    Raises RuntimeError if one does not come within the timeout.
    """
    with _numbered_apart(ranks):
        group = dist.new_group([*ranks], timeout, backend="gloo", use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)  # this rank is one of them
    return group


@contextmanager
def _numbered_apart(ranks: Sequence[int]) -> Iterator[None]:
    """Number groups that are made in this context apart from those that all ranks make. 2.11.

    Torch names a group by how many a rank has made. Where some ranks alone made one, all later groups have two names, and their ranks
    wait for each other forever.
    """
    _MADE[tuple(ranks)] += 1
    text, before = f"{[*ranks]} {_MADE[tuple(ranks)]}", _world.group_count
    _world.group_count = int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)
    try:
        yield
    finally:
        _world.group_count = before
