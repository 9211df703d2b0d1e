"""Process groups for the messages between ranks of a pipeline: breaking one harms no other traffic."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from pipecompile.distributed.rank_mesh import RankMesh
from pipecompile.torch_private.process_groups import cpu_backend

__all__ = ["drop_message_group", "message_backend"]

_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
"""The process group of messages, per process group of a pipeline."""


def message_backend(ranks: RankMesh) -> tuple[Any, Mapping[int, int]]:
    """Return the c10d backend for messages of a pipeline, and the number that each peer has in it. All ranks must call this together.

    Raises RuntimeError if a rank does not come within the timeout of `init_process_group`.
    """
    members = [ranks.rank_of(peer) for peer in range(ranks.size)]
    if ranks.group not in _GROUPS:
        limit = timedelta(seconds=ranks.timeout)
        group = dist.new_group(members, limit, backend="gloo", use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        _GROUPS[ranks.group] = group
    group = _GROUPS[ranks.group]
    peers = ((peer, rank) for peer, rank in enumerate(members) if peer != ranks.index)
    return cpu_backend(group), {peer: dist.get_group_rank(group, rank) for peer, rank in peers}


def drop_message_group(ranks: RankMesh) -> None:
    """Forget a group whose connections are broken."""
    _GROUPS.pop(ranks.group, None)
