"""The ranks that save a checkpoint together: all, or those that are left after others were lost."""

from __future__ import annotations

import torch.distributed as dist

__all__ = ["save_among", "saving_group", "saving_ranks"]

_LEFT: list[tuple[dist.ProcessGroup, dist.ProcessGroup]] = []
"""The default group, and the group of the ranks that are left of it."""


def save_among(group: dist.ProcessGroup) -> None:
    """Save checkpoints among the ranks of a group, for as long as the default group is the present one."""
    assert dist.group.WORLD is not None
    _LEFT[:] = [(dist.group.WORLD, group)]


def saving_group() -> dist.ProcessGroup | None:
    """Return the group of the ranks that are left; None if all are."""
    return _LEFT[0][1] if _LEFT and _LEFT[0][0] is dist.group.WORLD else None


def saving_ranks() -> list[int]:
    """Return the ranks that save."""
    group = saving_group()
    return [*range(dist.get_world_size())] if group is None else dist.get_process_group_ranks(group)
