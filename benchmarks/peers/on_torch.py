"""torch.distributed.pipelining: the model as it is written, through `torch.export`."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import PARTS, SAMPLES, TIMEOUT, Net, batch, loss_of
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B, SplitPoint, pipeline
from torch.nn.parallel import DistributedDataParallel

PACKAGES = ("torch",)
CUTS = {2: ["layers.2"], 4: ["layers.1", "layers.2", "layers.3"]}


class Peer:
    def __init__(self, kind: str, *, looped: bool = False, copies: bool = False, sharded: bool = False) -> None:
        dist.init_process_group("gloo", timeout=TIMEOUT)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.copies = DistributedDataParallel(Net(kind)) if copies else None
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")) if sharded else None
        if copies:
            return
        ranks, group = self.world, None
        if self.mesh:
            ranks, group, self.rank = 2, self.mesh["pp"].get_group(), self.mesh.get_local_rank("pp")
        cuts = dict.fromkeys(CUTS[ranks * (2 if looped else 1)], SplitPoint.BEGINNING)
        part = batch()[0][: SAMPLES // PARTS // (2 if sharded else 1)]
        pipe = pipeline(Net(kind), mb_args=(part,), split_spec=cuts)
        indices = range(self.rank, len(cuts) + 1, ranks)
        self.stages = [pipe.build_stage(i, torch.device("cpu"), group=group) for i in indices]
        self.modules = [stage.submod for stage in self.stages]
        if self.mesh:
            self.modules = [fully_shard(module, mesh=self.mesh["dp"]) for module in self.modules]
        make = ScheduleInterleaved1F1B if looped else Schedule1F1B
        self.schedule = make(self.stages if looped else self.stages[0], n_microbatches=PARTS, loss_fn=loss_of)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        if self.copies is not None:
            self.copies.zero_grad()
            loss_of(self.copies(x.chunk(self.world)[self.rank]), y.chunk(self.world)[self.rank]).backward()
            return
        for module in self.modules:
            module.zero_grad()
        if self.mesh:
            x, y = (value.chunk(2)[self.mesh.get_local_rank("dp")] for value in (x, y))
        first, last = (any(getattr(stage, name) for stage in self.stages) for name in ("is_first", "is_last"))
        self.schedule.step(*((x,) if first else ()), **({"target": y} if last else {}))

    def gradients(self) -> dict[str, torch.Tensor]:
        modules = [self.copies.module] if self.copies is not None else self.modules
        mine = {name: p.grad for m in modules for name, p in m.named_parameters() if p.grad is not None}
        return {name: getattr(grad, "full_tensor", lambda grad=grad: grad)() for name, grad in mine.items()}

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for module in self.modules for name, p in module.named_parameters()}

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value for module in self.modules for name, value in module.state_dict().items()}

    def save(self, folder: Path, step: int) -> None:
        dcp.save({"model": self.state()}, checkpoint_id=folder / str(step))

    def load(self, folder: Path) -> str:
        dcp.load({"model": self.state()}, checkpoint_id=folder / "2")
        return "step 2"

    def into_eager(self, folder: Path) -> None:
        dcp.load({"model": Net("plain").state_dict()}, checkpoint_id=folder / "2", no_dist=True)

    def shown(self) -> str:
        order = getattr(self.schedule, "pipeline_order", None) or self.schedule._get_pipeline_order()
        return "\n".join(f"rank {rank}: {' '.join(map(str, row))}" for rank, row in (order or {}).items())
