"""The copies of a pipeline, as `pipe.copies` shows them: which are left, which were lost, and a process group of the ranks that are
left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch.distributed as dist

from pipecompile.distributed.data_parallel.left_groups import left_group
from pipecompile.distributed.rank_mesh import RankMesh

__all__ = ["PipelineCopies"]


@dataclass(frozen=True, slots=True)
class PipelineCopies:
    """The copies of a pipeline.

    left     numbers of the copies that are left, in the order of the mesh that was compiled with
    lost     numbers of the copies that were lost
    number   number of the copy of this rank
    ranks    the ranks of all copies that are left
    group    a process group of these ranks, with gloo, after a loss; None, the default group of torch, before
    """

    left: tuple[int, ...]
    lost: tuple[int, ...]
    number: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, ranks: RankMesh) -> Self:
        """Return the copies of a mesh."""
        lost = tuple(number for number in range(len(ranks.copies)) if number not in ranks.left)
        group = left_group(ranks.members) if lost else None
        return cls(ranks.left, lost, ranks.number_of_copy, ranks.members, group)
