"""nanotron: every layer in a `PipelineBlock`, which sends a value to the rank of its consumer, with CUDA replaced by the CPU.

The package 0.4 does not import; a checkout of its repository does: `PYTHONPATH=nanotron/src`.
"""

from __future__ import annotations

import nanotron.logging  # noqa: F401 - the other modules import after this one
import torch
import torch.distributed as dist
from cuda_as_cpu import pretend
from models import PARTS, TIMEOUT, Net, NotAsked, loss_of
from nanotron.parallel import ParallelContext
from nanotron.parallel.pipeline_parallel.block import PipelineBlock
from nanotron.parallel.pipeline_parallel.engine import OneForwardOneBackwardPipelineEngine
from nanotron.parallel.pipeline_parallel.p2p import P2P
from nanotron.parallel.pipeline_parallel.tensor_pointer import TensorPointer
from torch import nn

PACKAGES = ("nanotron", "torch")


class Blocks(nn.Module):
    """The model, written for nanotron."""

    def __init__(self, model: Net, p2p: P2P) -> None:
        super().__init__()
        self.kind, self.p2p = model.kind, p2p
        self.tok_embeddings = self.wrap(model.tok_embeddings, 0, "input")
        self.layers = nn.ModuleList(self.wrap(layer, i // 2, "x") for i, layer in enumerate(model.layers))
        self.product = self.wrap(torch.mul, 1, "input", "other")
        self.norm = self.wrap(model.norm, 1, "input")
        self.lm_head = self.wrap(model.lm_head, 1, "input")
        self.loss = self.wrap(loss_of, 1, "logits", "target")

    def wrap(self, layer: object, rank: int, *keys: str) -> PipelineBlock:
        block = PipelineBlock(self.p2p, lambda: layer, {}, set(keys), {"output"})
        block.build_and_set_rank(rank)
        return block

    def forward(self, words: object, target: object) -> object:
        first = x = self.tok_embeddings(input=words)["output"]
        for layer in self.layers:
            x = layer(x=x)["output"]
        if self.kind == "skip":
            x = self.product(input=x, other=first)["output"]
        x = self.lm_head(input=self.norm(input=x)["output"])["output"]
        return self.loss(logits=x, target=target)["output"]


class Peer:
    def __init__(self, kind: str, *, looped: bool = False, copies: bool = False, sharded: bool = False) -> None:
        if kind == "tied" or looped or copies or sharded:
            raise NotAsked("not tried")
        dist.init_process_group("gloo", timeout=TIMEOUT)
        pretend()
        context = ParallelContext(data_parallel_size=1, pipeline_parallel_size=2, tensor_parallel_size=1)
        self.group = context.pp_pg
        self.model = Blocks(Net(kind), P2P(self.group, device=torch.device("cpu")))
        self.engine = OneForwardOneBackwardPipelineEngine()

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.model.zero_grad()
        first = dist.get_rank() == 0
        parts = [
            {"words": a if first else TensorPointer(0), "target": TensorPointer(1) if first else b}
            for a, b in zip(x.tensor_split(PARTS), y.tensor_split(PARTS), strict=True)
        ]
        self.engine.train_batch_iter(self.model, self.group, iter(parts), PARTS, None)

    def gradients(self) -> dict[str, torch.Tensor]:
        mine = {name.replace(".pp_block", ""): p.grad for name, p in self.model.named_parameters()}
        return {name: grad for name, grad in mine.items() if grad is not None}

    def weights(self) -> dict[str, torch.Tensor]:
        return {name.replace(".pp_block", ""): p.detach().clone() for name, p in self.model.named_parameters()}
