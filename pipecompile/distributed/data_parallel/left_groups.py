"""Process groups of the ranks that remain after others were lost. They are created without the lost ranks.

    ranks 0, 1, 2, 3     the default group     a collective waits for ranks 2 and 3 forever
    ranks 0, 1           a group of ours       only its own ranks create it

A process keeps them: two pipelines that lose the same copy share one group.
"""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from pipecompile.distributed.failures.unopened_groups import opening
from pipecompile.errors import InputError
from pipecompile.parameters.saving_group import save_among
from pipecompile.torch_private.process_groups import group_of_some

__all__ = ["lost_ranks", "note_lost", "open_left_group", "require_present"]


class _Left(NamedTuple):
    """`groups` by their ranks, and the ranks that are `lost`, with how."""

    groups: dict[tuple[int, ...], dist.ProcessGroup]
    lost: dict[int, str]


_LEFT: WeakKeyDictionary[dist.ProcessGroup, _Left] = WeakKeyDictionary()
"""Groups and losses per default group, with which they end."""


def open_left_group(ranks: tuple[int, ...], timeout: float) -> dist.ProcessGroup:
    """Return a group of these ranks, which call this together. Raises GroupNotOpened if one does not come within `timeout` seconds."""
    groups = _left().groups
    if ranks not in groups:
        with opening(ranks, timeout):
            groups[ranks] = group_of_some(ranks, timedelta(seconds=timeout))
    return groups[ranks]


def note_lost(ranks: dict[int, str]) -> None:
    """Note ranks that are lost, with how. Checkpoints are saved by the others, if these have a group."""
    groups, lost = _left()
    lost.update(ranks)
    others = tuple(rank for rank in range(dist.get_world_size()) if rank not in lost)
    if others in groups:
        save_among(groups[others])


def lost_ranks() -> dict[int, str]:
    """Return the ranks that are lost, with how."""
    return _left().lost


def require_present(ranks: tuple[int, ...]) -> None:
    """Raise InputError for a mesh with ranks that are lost."""
    lost = lost_ranks()
    if absent := [rank for rank in ranks if rank in lost]:
        raise InputError(
            f"the mesh has ranks that are lost: {', '.join(map(str, absent))}",
            where=lost[absent[0]],
            why="a pipeline of all ranks of the mesh would wait for them forever",
            hint="copy.deepcopy(pipe) of a pipeline that goes on; or the ranks started again, from the last checkpoint",
        )


def _left() -> _Left:
    """Return the groups and losses noted for the present default group; empty ones if there is no default group."""
    world = dist.group.WORLD
    return _Left({}, {}) if world is None else _LEFT.setdefault(world, _Left({}, {}))
