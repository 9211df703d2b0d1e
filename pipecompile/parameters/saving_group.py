"""The ranks that save a checkpoint together: those of a group, by default all, or those that are left after others were lost."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch.distributed as dist

from pipecompile.errors import InputError
from pipecompile.text.shown_value import shown

__all__ = ["Savers", "checked_group", "save_among", "saving_group", "saving_ranks"]

_LEFT: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
"""The group of the ranks that are left, per default group."""


def save_among(group: dist.ProcessGroup) -> None:
    """Save checkpoints among the ranks of a group, for as long as the default group is the present one."""
    assert dist.group.WORLD is not None
    _LEFT[dist.group.WORLD] = group


def saving_group() -> dist.ProcessGroup | None:
    """Return the group of the ranks that are left; None if all are."""
    return None if dist.group.WORLD is None else _LEFT.get(dist.group.WORLD)


def checked_group(group: object) -> dist.ProcessGroup | None:
    """Return the process group that a caller gave. Raises InputError for another object, and on a rank that is not in it."""
    if group is None:
        return None
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        why, hint = f"rank {dist.get_rank()} is not in it", "save on the ranks of the group only"
        raise InputError("process_group= is a group of other ranks", why=why, hint=hint)
    if not isinstance(group, dist.ProcessGroup):
        raise InputError(f"process_group={shown(group)} is not a process group", hint="process_group=pipe.copies.group")
    return group


def saving_ranks(group: dist.ProcessGroup | None) -> list[int]:
    """Return the ranks that save in a group; None is the default group."""
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
        """Return the present ranks; None for a process that is not a rank."""
        return (
            cls(tuple(saving_ranks(group)), dist.get_rank(), group, dist.group.WORLD) if dist.is_initialized() else None
        )

    @property
    def number(self) -> int:
        """Place of this rank among those that save, as files are numbered."""
        return self.ranks.index(self.rank)

    @property
    def are_gone(self) -> bool:
        """Whether their process group has been destroyed."""
        return not dist.is_initialized() or dist.group.WORLD is not self.default
