"""torchft: no pipeline, but copies of a model that go on without one that is lost; a lighthouse runs beside the ranks."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from models import TIMEOUT, Net, NotAsked, loss_of
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

PACKAGES = ("torchft-nightly", "torch")


class Peer:
    def __init__(self, kind: str, *, looped: bool = False, copies: bool = False, sharded: bool = False) -> None:
        if not copies or looped or sharded:
            raise NotAsked("it has no pipeline")
        self.rank, self.world, self.model = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Net(kind)
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=TIMEOUT),
            min_replica_size=1,
            load_state_dict=self.model.load_state_dict,
            state_dict=self.model.state_dict,
            replica_id=f"copy_{self.rank}_",
            lighthouse_addr=os.environ["LIGHTHOUSE"],
            store_addr="127.0.0.1",
            store_port=self.store.port,
            rank=0,
            world_size=1,
            timeout=TIMEOUT,
        )
        self.copies = DistributedDataParallel(self.manager, self.model)
        self.optimizer = Optimizer(self.manager, torch.optim.SGD(self.model.parameters(), lr=0.0))

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        mine = [value.chunk(self.world)[self.rank] for value in (x, y)]
        loss_of(self.copies(mine[0]), mine[1]).backward()
        self.optimizer.step()
        self.note = f"{self.manager.num_participants()} copies took part"

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}
