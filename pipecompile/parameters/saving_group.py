"""The ranks that save a checkpoint together: all, or those that are left after others were lost."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

__all__ = ["Savers", "save_among", "saving_group", "saving_ranks"]

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


@dataclass(frozen=True, slots=True)
class Savers:
    """The `ranks` that save a checkpoint together, in process group `group` (None: the default one), as they are when the save is called.

    A thread that writes later asks these: the default group may be gone by then, and the files of one rank are no checkpoint.
    """

    ranks: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup | None
    default: dist.ProcessGroup | None

    @classmethod
    def present(cls, group: dist.ProcessGroup | None) -> Savers | None:
        """Return the present ranks; None for a process that is no rank."""
        return cls(tuple(saving_ranks()), dist.get_rank(), group, dist.group.WORLD) if dist.is_initialized() else None

    @property
    def number(self) -> int:
        """Place of this rank among those that save, as files are numbered."""
        return self.ranks.index(self.rank)

    @property
    def are_gone(self) -> bool:
        """Whether their process group has been destroyed."""
        return not dist.is_initialized() or dist.group.WORLD is not self.default
