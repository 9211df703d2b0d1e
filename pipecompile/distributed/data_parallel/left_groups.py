"""Process groups of ranks that are left after others were lost. Those that are lost take no part in the making.

    ranks 0, 1, 2, 3     the default group     a collective waits for ranks 2 and 3 for ever
    ranks 0, 1           a group of ours       its own ranks alone make it

A process keeps them: two pipelines that lose the same copy have one group.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from pipecompile.errors import InputError
from pipecompile.parameters.saving_group import save_among
from pipecompile.torch_private.process_groups import group_of_some

__all__ = ["left_group", "lost_ranks", "note_lost", "open_left_group", "require_present"]

_GROUPS: dict[tuple[int, ...], dist.ProcessGroup] = {}
"""Groups by their ranks. They end with the default group of the process."""

_LOST: dict[int, str] = {}
"""The ranks that this process knows to be lost, and how."""

_WORLDS: list[dist.ProcessGroup] = []
"""The default group that the groups and the losses belong to."""


def left_group(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """Return the group of these ranks; None if none was opened."""
    _follow_world()
    return _GROUPS.get(ranks)


def open_left_group(ranks: tuple[int, ...], timeout: float) -> dist.ProcessGroup:
    """Return a group of these ranks, which call this together. Raises RuntimeError if one does not come within `timeout` seconds."""
    _follow_world()
    if ranks not in _GROUPS:
        _GROUPS[ranks] = group_of_some(ranks, timedelta(seconds=timeout))
    return _GROUPS[ranks]


def note_lost(ranks: dict[int, str]) -> None:
    """Note ranks that are lost, with how. Checkpoints are saved by the others, if these have a group."""
    _follow_world()
    _LOST.update(ranks)
    others = tuple(rank for rank in range(dist.get_world_size()) if rank not in _LOST)
    if others in _GROUPS:
        save_among(_GROUPS[others])


def lost_ranks() -> dict[int, str]:
    """Return the ranks that are lost, with how."""
    _follow_world()
    return _LOST


def require_present(ranks: tuple[int, ...]) -> None:
    """Raise InputError for a mesh with ranks that are lost."""
    if lost := [rank for rank in ranks if rank in lost_ranks()]:
        raise InputError(
            f"the mesh has ranks that are lost: {', '.join(map(str, lost))}",
            where=_LOST[lost[0]],
            why="a pipeline of all ranks of the mesh would wait for them for ever",
            hint="copy.deepcopy(pipe) of a pipeline that goes on; or the ranks started again, from the last checkpoint",
        )


def _follow_world() -> None:
    """Forget what belongs to a default group that was destroyed."""
    world = dist.group.WORLD
    if world is not None and [world] != _WORLDS:
        _WORLDS[:] = [world]
        _GROUPS.clear()
        _LOST.clear()
