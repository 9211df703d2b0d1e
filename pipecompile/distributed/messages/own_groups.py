"""Process groups of our own, beside those of the mesh: messages and collectives of pipelines go through them.

    the mesh's group of ranks 0, 2     what layers, metrics and other code of the user send
    our group of ranks 0, 2            what pipelines send; a failed step ends it, and the next pipeline of the mesh opens another

    a mesh on GPUs                     NCCL: gradients, parameters, statistics
    our group beside it                gloo: what ranks agree on, which is on the CPU, and for which no GPU is waited

A step that fails leaves ranks at different collectives of a group. Whatever is sent in it next meets a message of another size, and
gloo ends the process. So a group of ours is closed at a failure, and the mesh's groups stay as they are.

Groups meet in the store of the pipeline that opens them: names of torch's groups depend on how many a process has made. A group with
NCCL cannot be used after a failure, nor can a group in which layers of the model send. A collective under way in it would wait forever, and
block the GPU, for ranks that have left the step. So its communicators are aborted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from pipecompile.distributed.failures.unopened_groups import opening
from pipecompile.distributed.protocol import ABORT
from pipecompile.distributed.rank_mesh import RankMesh
from pipecompile.errors import InputError
from pipecompile.torch_private.process_groups import (
    abort_nccl,
    close_connections,
    device_types,
    gloo_backend,
    gloo_group,
    has_gloo_alone,
    limit_timeout,
    without_timeout,
)

__all__ = ["GroupUse", "drop_own_groups", "open_own_groups", "own_group", "require_unspent"]

_OWN: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
"""Our group per group of a mesh."""

_BACKENDS: WeakKeyDictionary[dist.ProcessGroup, Any] = WeakKeyDictionary()
"""The backend of our group with gloo, per group of a mesh."""

_USES: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""Count, per group of a mesh, of the uses of its backend. Pipelines of different meshes have it in common: of a mesh and of a part of it."""

_SPENT: WeakSet[dist.ProcessGroup] = WeakSet()
"""User groups in which a failed step may have a message under way."""

_DROPS: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""Count, per group of a mesh, of the times that groups beside it were dropped: a pipeline that opened channels before opens them anew."""


def open_own_groups(ranks: RankMesh, store: Store) -> None:
    """Open groups with the ranks of the mesh's groups, and forget older ones. All ranks of the mesh must call this together.

    Raises GroupNotOpened if a rank does not come within the timeout of `init_process_group`.
    """
    limit = timedelta(seconds=ranks.timeout)
    for place, group in enumerate(ranks.groups):
        members = dist.get_process_group_ranks(group)
        meeting = PrefixStore(f"group/{place}/{'-'.join(map(str, members))}", store)
        with opening(members, ranks.timeout):
            backend = gloo_backend(meeting, group.rank(), group.size(), limit)
        without_timeout(backend)
        _BACKENDS[group], _USES[group] = backend, 0
        kinds = device_types(group) if has_gloo_alone(group) else ()
        _OWN[group] = gloo_group(backend, meeting, {"cpu", *kinds})


def own_group(group: dist.ProcessGroup, device_type: str = "cpu") -> dist.ProcessGroup:
    """Return the group with the ranks of a mesh's group in which pipelines send tensors of devices of a type: ours, or that group itself
    if it has NCCL for them, or none is open.
    """
    ours = _OWN.get(group)
    return ours if ours is not None and device_type in device_types(ours) else group


class GroupUse:
    """The use that one pipeline makes of groups: ours, and the user's in which layers of its model send.

    Raises InputError for groups that a failed step has spent.
    """

    def __init__(self, ranks: RankMesh) -> None:
        self.ranks = ranks
        self._layers: list[dist.ProcessGroup] = []
        self._launched: deque[tuple[dist.ProcessGroup, Callable[[], None]]] = deque()
        self._openings = self._drops = 0
        self.note_layers([ranks.tensor_group])

    def note_layers(self, groups: Iterable[dist.ProcessGroup | None]) -> None:
        """Note groups in which layers send: a failure leaves messages in them. They wait no longer than the pipeline for a silent rank:
        the groups of a mesh are made without the timeout of `init_process_group`.
        """
        for group in filter(None, groups):
            self._layers.append(group)
            limit_timeout(group, timedelta(seconds=self.ranks.timeout))
        require_unspent((*self.ranks.groups, *self._layers), self.ranks.members)

    @property
    def is_open(self) -> bool:
        """Whether this process has groups of ours for all groups of the mesh."""
        return all(group in _BACKENDS for group in self.ranks.groups)

    @property
    def is_stale(self) -> bool:
        """Whether groups that the pipeline has opened or found open were dropped since."""
        return self._drops != _DROPS.get(self.ranks.group, 0)

    def opened(self, store: Store, *, is_new: bool) -> tuple[Any, int]:
        """Return the c10d backend for messages between the ranks of a pipeline, whose numbers in it are their places in the pipeline, and
        the number of this use of it: each has tags of its own.

        With `is_new` groups are opened, by all ranks of the mesh together. Raises GroupNotOpened as `open_own_groups` does.
        """
        self._openings += 1
        if is_new:
            open_own_groups(self.ranks, PrefixStore(f"opening/{self._openings}", store))
        group = self.ranks.group
        self._drops = _DROPS.get(group, 0)
        _USES[group] += 1
        return _BACKENDS[group], _USES[group]

    def drop(self) -> None:
        """Close and forget our groups beside those of the mesh. Groups with NCCL, and those in which layers send, are spent."""
        under_way = {group for group, _ in self._launched}
        self._launched.clear()
        drop_own_groups(self.ranks, self._layers)
        for group in under_way:
            abort_nccl(group)

    def launched(self, group: dist.ProcessGroup, wait: Callable[[], None]) -> None:
        """Note a collective that a stream waits for, and how the host waits for it."""
        self._launched.append((group, wait))

    def settle(self) -> None:
        """Return when all collectives that streams wait for are over. Raises RankLost."""
        for _, wait in [*self._launched]:  # another thread may drop the groups
            wait()
        self._launched.clear()


def drop_own_groups(ranks: RankMesh, layer_groups: Iterable[dist.ProcessGroup]) -> None:
    """Close and forget our groups beside those of a mesh. Groups with NCCL, and those in which layers send, are spent."""
    _SPENT.update(layer_groups)
    for group in ranks.groups:
        _DROPS[group] = _DROPS.get(group, 0) + 1
        if not has_gloo_alone(group):
            _SPENT.add(group)
        backend = _BACKENDS.pop(group, None)
        _OWN.pop(group, None)
        if backend is not None:
            close_connections(backend, ABORT.tag)


def require_unspent(groups: Iterable[dist.ProcessGroup | None], ranks: Iterable[int]) -> None:
    """Raise InputError for a group in which a step that failed may have a message under way."""
    if any(group in _SPENT for group in groups if group is not None):
        raise InputError(
            f"a pipeline on ranks {', '.join(map(str, ranks))} has failed, and this one would use its process groups",
            why="ranks left that step at different messages of a group, and the next ones would meet them",
            hint="mesh=init_device_mesh(...) made anew, for parallelize_module and SyncBatchNorm too; or the ranks started again, from "
            "the last checkpoint",
        )
