"""pipecompile: the model as it is written."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import PARTS, TIMEOUT, Net, batch, loss_of
from torch.distributed import init_device_mesh

import pipecompile as pc

PACKAGES = ("pipecompile", "torch")


class Peer:
    def __init__(self, kind: str, *, looped: bool = False, copies: bool = False, sharded: bool = False) -> None:
        dist.init_process_group("gloo", timeout=TIMEOUT)
        self.model = Net(kind)
        world, mesh = dist.get_world_size(), None
        if copies:
            mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "pp"))
        if sharded:
            mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp_shard", "pp"))
        self.mesh = mesh
        ranks = mesh["pp"].size() if mesh else world
        self.pipe = pc.compile(
            self.model,
            ranks * (2 if looped else 1),
            mesh=mesh,
            example_args=(batch()[0],),
            loss_fn=loss_of,
            n_microbatches=PARTS,
            schedule="interleaved" if looped else "1f1b",
            cost="analytic",
        )

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """Return this copy's part of a batch."""
        return x.chunk(self.mesh.size(0))[self.mesh.get_local_rank(0)] if self.mesh else x

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.pipe.zero_grad()
        self.pipe.step(self.part(x), target=self.part(y))

    def gradients(self) -> dict[str, torch.Tensor]:
        mine = {name: p.grad for name, p in self.pipe.named_parameters() if p.grad is not None}
        return {name: getattr(grad, "full_tensor", lambda grad=grad: grad)() for name, grad in mine.items()}

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.pipe.named_parameters()}

    def save(self, folder: Path, step: int) -> None:
        pc.save_checkpoint({"model": self.pipe.state_dict()}, folder, step)

    def load(self, folder: Path) -> str:
        last = pc.latest_checkpoint(folder)
        state = {"model": self.pipe.state_dict()}
        dcp.load(state, checkpoint_id=last)
        self.pipe.load_state_dict(state["model"])
        return f"step {last.name}"

    def into_eager(self, folder: Path) -> None:
        dcp.load({"model": Net("plain").state_dict()}, checkpoint_id=pc.latest_checkpoint(folder), no_dist=True)

    def shown(self) -> str:
        return f"{self.pipe.schedule}\n{self.pipe.simulate()}"
