"""The ranks that run a pipeline, and the place of this rank among them.

mesh ("dp", "pp")      pp ──►  one rank per pipeline device
  rank 0   rank 1      dp │    the same stages on another part of the batch: `dp` has parameters whole, `dp_shard` sharded
  rank 2   rank 3         ▼    `tp`: the same stages on the same batch, with parts of their layers
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from pipecompile.errors import InputError, ScheduleError
from pipecompile.parameters.process_identity import start_of_ranks
from pipecompile.torch_private.accelerators import accelerator_type, is_accelerator
from pipecompile.torch_private.process_groups import default_store, flattened, timeout_of

__all__ = ["RankMesh"]

_OUTER_FIRST = ("dp", "dp_shard", "tp")
"""The order of the dimensions that a sharded parameter has, whatever that of the mesh: the last one cuts within the others."""


@dataclass(frozen=True, slots=True)
class RankMesh:
    """The mesh of a pipeline as one rank sees it.

    `group` has one rank per pipeline device; this rank is number `index` of its `size` ranks. `members` are all ranks of the mesh.
    `replica_group` has the ranks that run the same stages on other parts of the batch, `shard_mesh` those of them that shard
    parameters among themselves, `tensor_group` those that have other parts of the same layers, `shard_layout` both; None if there are
    none.
    `copy` are the members that work on one part of the batch: all members, if there is one pipeline. `copies` has, per copy that there
    was at first, its ranks, of which those at one place run the same stages; `left` are the numbers of the copies that are left.
    `device_type` is that of the mesh; of all ranks, "cuda" if their process group has NCCL, as the default one has beside GPUs.
    """

    group: dist.ProcessGroup
    index: int
    size: int
    members: tuple[int, ...]
    replica_group: dist.ProcessGroup | None = None
    shard_mesh: DeviceMesh | None = None
    shard_layout: DeviceMesh | None = None
    tensor_group: dist.ProcessGroup | None = None
    device_type: str = "cpu"
    copy: tuple[int, ...] = ()
    copies: tuple[tuple[int, ...], ...] = ()
    left: tuple[int, ...] = (0,)

    @classmethod
    def of(cls, mesh: DeviceMesh | None) -> RankMesh:
        """Return the ranks of `mesh`, by default all ranks."""
        if mesh is not None:
            return cls._of_mesh(mesh)
        members = tuple(range(dist.get_world_size()))
        group = dist.group.WORLD
        assert group is not None
        has_nccl = "nccl" in dist.get_backend_config(group) and accelerator_type() == "cuda"
        kind = "cuda" if has_nccl else "cpu"
        return cls(group, dist.get_rank(), len(members), members, device_type=kind, copy=members, copies=(members,))

    @classmethod
    def _of_mesh(cls, mesh: DeviceMesh) -> RankMesh:
        names = mesh.mesh_dim_names or ("pp",) * (mesh.ndim == 1)
        _check(mesh, names)
        group = mesh.get_group("pp" if mesh.mesh_dim_names is not None else 0)
        parts = tuple(name for name in names if name in ("dp", "dp_shard") and mesh.size(names.index(name)) > 1)
        copies = _copies_of(mesh, names)
        return cls(
            group,
            dist.get_rank(group),
            dist.get_world_size(group),
            members=tuple(sorted(mesh.mesh.flatten().tolist())),
            replica_group=_group_along(mesh, parts),
            shard_mesh=_along(mesh, parts) if "dp_shard" in parts else None,
            shard_layout=_along(mesh, [*parts, *({"tp"} & {*names})]) if "dp_shard" in parts else None,
            tensor_group=mesh["tp"].get_group() if "tp" in names else None,
            device_type=mesh.device_type,
            copy=next(tuple(sorted(copy)) for copy in copies if dist.get_rank() in copy),
            copies=copies,
            left=tuple(range(len(copies))),
        )

    @property
    def rank(self) -> int:
        """Number of this process among all processes, as `torchrun` numbers them."""
        return dist.get_rank()

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The torch device of every pipeline device, as this rank uses it: always the device of this rank."""
        kind = self.device_type
        here = torch.device(kind)
        here = torch.device(kind, torch.accelerator.current_device_index()) if is_accelerator(here) else here
        return (here,) * self.size

    @contextmanager
    def as_devices(self) -> Iterator[None]:
        """Say in a ScheduleError of this context that the devices are ranks: its `devices=` would be stages in one process."""
        try:
            yield
        except ScheduleError as error:
            if "devices=" not in error.hint:
                raise
            several = f'n_stages={self.size}, one per rank of the pipeline; or schedule="interleaved", with several stages on each'
            hint = f"{several}; or other ranks, by torchrun --nproc-per-node= or mesh="
            why = error.why or f"the devices are the ranks of the pipeline, of which there are {self.size}"
            raise ScheduleError(error.what, where=error.where, why=why, hint=hint) from error.__cause__

    @property
    def shards(self) -> int:
        """Number of ranks that have a part of each parameter."""
        return 1 if self.shard_mesh is None else self.shard_mesh.size(-1)

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The process groups in which the ranks of a pipeline and its copies exchange something, each once."""
        shards = self.shard_mesh.get_all_groups() if self.shard_mesh is not None else ()
        every = (self.group, self.replica_group, *shards, self.tensor_group)
        return tuple(dict.fromkeys(group for group in every if group is not None))

    def rank_of(self, index: int) -> int:
        """Return the rank, as `torchrun` numbers them, that is pipeline device `index`."""
        return dist.get_global_rank(self.group, index)

    @property
    def number_of_copy(self) -> int:
        """Number of this rank's copy of the pipeline in `copies`."""
        return next(number for number, copy in enumerate(self.copies) if self.rank in copy)

    def of_copies(self, left: tuple[int, ...]) -> RankMesh:
        """Return the ranks of the copies `left`. The replica group is the old one."""
        members = tuple(sorted(chain.from_iterable(self.copies[number] for number in left)))
        return replace(self, members=members, left=left)

    @property
    def replicas(self) -> tuple[int, ...]:
        """The ranks that run the stages of this rank, of all copies that are left."""
        place = self.copies[self.number_of_copy].index(self.rank)
        return tuple(sorted(self.copies[number][place] for number in self.left))

    @property
    def beside(self) -> tuple[int, ...]:
        """The other ranks with which layers of a stage exchange values: ranks of `tp`, or of SyncBatchNorm."""
        group = self.tensor_group
        ranks = self.replicas if group is None else dist.get_process_group_ranks(group)
        return tuple(rank for rank in ranks if rank != self.rank)

    @property
    def timeout(self) -> float:
        """Seconds after which a silent rank counts as lost: `timeout` of `init_process_group`."""
        world = dist.group.WORLD  # the groups of a mesh are made without the timeout
        assert world is not None
        return timeout_of(world).total_seconds()

    def store(self, number: int) -> Store:
        """Return the part of the default store that belongs to communicator `number` of these members."""
        members = "-".join(map(str, self.members))
        return PrefixStore(f"pipecompile/{start_of_ranks()}/{members}/{number}", default_store())


def _check(mesh: DeviceMesh, names: tuple[str, ...]) -> None:
    """Raise InputError for dimensions that a pipeline cannot use, and on a rank outside the mesh."""
    if "pp" not in names or set(names) - {"pp", "dp", "dp_shard", "tp"}:
        raise InputError(
            f"the dimensions of the mesh are {names or 'not named'}",
            why="a pipeline has pp, its devices; dp and dp_shard, its copies; and tp, parts of its layers",
            hint='init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))',
        )
    if mesh.get_coordinate() is None:
        raise InputError(f"rank {dist.get_rank()} is not in the mesh", hint="compile on the ranks of the mesh only")


def _along(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    """Return the part of a mesh along dimensions, the outer ones first. Raises InputError where torch cannot reorder them."""
    ordered = tuple(name for name in _OUTER_FIRST if name in names)
    try:
        return mesh[ordered]
    except KeyError as error:
        raise InputError(
            f"torch {torch.__version__} cannot take the dimensions {ordered} of the mesh in this order",
            why=str(error.args[0]),
            hint=f"mesh_dim_names={('pp', *ordered)}",
        ) from None


def _copies_of(mesh: DeviceMesh, names: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Return, per part of the batch, the ranks that have it, in the order of their places in the pipeline."""
    parts = [place for place, name in enumerate(names) if name in ("dp", "dp_shard")]
    others = [place for place in range(mesh.ndim) if place not in parts]
    rows = mesh.mesh.permute(*parts, *others).flatten(len(parts)).flatten(0, -2) if parts else mesh.mesh.flatten()[None]
    return tuple(tuple(row) for row in rows.tolist())


def _group_along(mesh: DeviceMesh, names: tuple[str, ...]) -> dist.ProcessGroup | None:
    """Return the process group along one or several dimensions; None for no dimension."""
    if len(names) < 2:
        return mesh.get_group(names[0]) if names else None
    return flattened(mesh[names], "pipecompile_" + "_".join(names), mesh.mesh.flatten().tolist()).get_group()
