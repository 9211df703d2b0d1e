"""The copies of a pipeline, as `pipe.copies` shows them: which are left, which were lost, and a process group of their ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch.distributed as dist

from pipecompile.distributed.data_parallel.left_groups import open_left_group
from pipecompile.distributed.failures.unopened_groups import GroupNotOpened
from pipecompile.distributed.rank_mesh import RankMesh
from pipecompile.errors import InputError

__all__ = ["PipelineCopies"]


@dataclass(frozen=True, slots=True)
class PipelineCopies:
    """The copies of a pipeline.

    left     numbers of the copies that are left, in the order of the mesh that was compiled with
    lost     numbers of the copies that were lost
    number   number of the copy of this rank
    ranks    the ranks of all copies that are left
    timeout  seconds in which all of them ask for their group
    """

    left: tuple[int, ...]
    lost: tuple[int, ...]
    number: int
    ranks: tuple[int, ...]
    timeout: float

    @classmethod
    def of(cls, ranks: RankMesh) -> Self:
        """Return the copies of a mesh."""
        lost = tuple(number for number in range(len(ranks.copies)) if number not in ranks.left)
        return cls(ranks.left, lost, ranks.number_of_copy, ranks.members, ranks.timeout)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """A process group of `ranks`, with gloo, made when all of them ask for it first; None, the default group, for all ranks.

        Raises InputError if one does not ask for it within the timeout of `init_process_group`.
        """
        if len(self.ranks) == dist.get_world_size():
            return None
        try:
            return open_left_group(self.ranks, self.timeout)
        except GroupNotOpened as error:
            raise InputError(
                "there is no process group of the ranks of the pipeline",
                why=f"they make it together: {error}",
                hint="group = pipe.copies.group on each of them, before it is used on one alone",
            ) from error
