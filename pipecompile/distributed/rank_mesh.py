"""Which ranks run a pipeline, and who this one is.

mesh ("dp", "pp")      pp ──►  one rank per pipeline device
  rank 0   rank 1      dp │    the same stages on another part of the batch: `dp` has parameters whole, `dp_shard` in parts
  rank 2   rank 3         ▼    `tp`: the same stages on the same batch, with parts of their layers
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pipecompile.errors import InputError
from pipecompile.torch_private.process_groups import flattened, timeout_of

__all__ = ["RankMesh"]


@dataclass(frozen=True, slots=True)
class RankMesh:
    """`group` has a rank per pipeline device, this one is number `index` of it. `members` are all ranks of the mesh.
    `replica_group` is the group of those that run the same stages on other parts of the batch, if there are several pipelines, and
    `shard_mesh` the mesh of those that keep the parameters of these in parts; `tensor_group` the group of those that have parts of the
    same layers.
    """

    group: dist.ProcessGroup
    index: int
    size: int
    members: tuple[int, ...]
    replica_group: dist.ProcessGroup | None = None
    shard_mesh: DeviceMesh | None = None
    tensor_group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, mesh: DeviceMesh | None, devices: Sequence[object] | None) -> RankMesh | None:
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
    def _of_mesh(cls, mesh: DeviceMesh) -> RankMesh:
        names = mesh.mesh_dim_names or ("pp",) * (mesh.ndim == 1)
        if "pp" not in names or set(names) - {"pp", "dp", "dp_shard", "tp"}:
            raise InputError(
                f"the dimensions of the mesh are {names or 'not named'}",
                why="a pipeline knows pp, its devices; dp and dp_shard, copies of it; and tp, parts of layers",
                hint='init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))',
            )
        if {"dp_shard", "tp"} <= set(names):
            raise InputError("the mesh has dp_shard and tp", why="parts of parts are not known", hint="dp and tp")
        if mesh.get_coordinate() is None:
            raise InputError(f"rank {dist.get_rank()} is not in the mesh", hint="compile on the ranks of the mesh only")
        group = mesh.get_group("pp" if mesh.mesh_dim_names is not None else 0)
        copies = tuple(name for name in names if name in ("dp", "dp_shard") and mesh.size(names.index(name)) > 1)
        parts = mesh["tp"].get_group() if "tp" in names else None
        members = tuple(sorted(mesh.mesh.flatten().tolist()))
        sharing = mesh[tuple(sorted(copies))] if "dp_shard" in copies else None
        return cls(
            group, dist.get_rank(group), dist.get_world_size(group), members, _joined(mesh, copies), sharing, parts
        )

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """One per pipeline device, as this rank sees it: all are where its own stages are."""
        backend = dist.get_backend(self.group)
        here = torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")
        return (here,) * self.size

    @property
    def member_index(self) -> int:
        """The number of this rank among the members."""
        return self.members.index(dist.get_rank())

    def rank_of(self, index: int) -> int:
        """The rank that is this pipeline device, as `torchrun` numbers them."""
        return dist.get_global_rank(self.group, index)

    @property
    def timeout(self) -> float:
        """Seconds until a rank that says nothing is given up: what `init_process_group(timeout=)` was told."""
        world = dist.group.WORLD  # a mesh makes its groups without it
        assert world is not None
        return timeout_of(world).total_seconds()


def _joined(mesh: DeviceMesh, names: tuple[str, ...]) -> dist.ProcessGroup | None:
    """The group along some dimensions."""
    if len(names) < 2:
        return mesh.get_group(names[0]) if names else None
    return flattened(mesh[names], "pipecompile_" + "_".join(names)).get_group()
