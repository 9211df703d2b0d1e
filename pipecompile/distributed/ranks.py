"""Which ranks run a pipeline, and who this one is.

mesh ("dp", "pp")      pp ──►  one rank per pipeline device
  rank 0   rank 1      dp │    the same stages on another part of the batch
  rank 2   rank 3         ▼
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pipecompile.errors import InputError

__all__ = ["Ranks"]


@dataclass(frozen=True, slots=True)
class Ranks:
    """`group` has a rank per pipeline device, this one is number `index` of it. `members` are all ranks of the mesh, and
    `replicas` the group of those that run the same stages, if there are several pipelines.
    """

    group: dist.ProcessGroup
    index: int
    size: int
    members: tuple[int, ...]
    replicas: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, mesh: DeviceMesh | None, devices: Sequence[object] | None) -> Ranks | None:
        """The ranks of a mesh; without one all ranks there are. None: this process alone, as `devices` asks for, too."""
        if mesh is not None:
            if devices is not None:
                raise InputError(
                    "devices= and mesh= are given", why="the mesh has a device per rank", hint="one of them"
                )
            return cls._of_mesh(mesh)
        if devices is not None or not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return None
        members = tuple(range(dist.get_world_size()))
        group = dist.group.WORLD
        assert group is not None
        return cls(group, dist.get_rank(), len(members), members)

    @classmethod
    def _of_mesh(cls, mesh: DeviceMesh) -> Ranks:
        names = mesh.mesh_dim_names or ("pp",) * (mesh.ndim == 1)
        if "pp" not in names or set(names) - {"pp", "dp"}:
            raise InputError(
                f"the dimensions of the mesh are {names or 'not named'}",
                why="a pipeline knows pp, its devices, and dp, copies of it",
                hint='init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))',
            )
        if mesh.get_coordinate() is None:
            raise InputError(f"rank {dist.get_rank()} is not in the mesh", hint="compile on the ranks of the mesh only")
        named = mesh.mesh_dim_names is not None
        group = mesh.get_group("pp" if named else 0)
        replicas = mesh.get_group("dp") if "dp" in names and mesh.size(names.index("dp")) > 1 else None
        members = tuple(sorted(mesh.mesh.flatten().tolist()))
        return cls(group, dist.get_rank(group), dist.get_world_size(group), members, replicas)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """One per pipeline device, as this rank sees it: all are where its own stages are."""
        backend = dist.get_backend(self.group)
        here = torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")
        return (here,) * self.size

    @property
    def place(self) -> int:
        """The number of this rank among the members."""
        return self.members.index(dist.get_rank())

    def rank_of(self, index: int) -> int:
        """The rank that is this pipeline device, as `torchrun` numbers them."""
        return dist.get_global_rank(self.group, index)

    @property
    def timeout(self) -> float:
        """Seconds until a rank that says nothing is given up: what `init_process_group(timeout=)` was told."""
        backend = self.group._get_backend(torch.device("cpu"))
        given: timedelta = backend.options._timeout
        return given.total_seconds()
