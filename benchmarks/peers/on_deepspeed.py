"""DeepSpeed: `PipelineModule` over a list of layers; a skip is written as a pair that goes through every layer."""

from __future__ import annotations

from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from models import PARTS, SAMPLES, TIMEOUT, WIDTH, WORDS, Block, Net, NotAsked, loss_of
from torch import nn
from torch.nn.functional import linear

PACKAGES = ("deepspeed", "torch")


class First(nn.Embedding):
    def forward(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = super().forward(words)
        return first, first.clone()


class Through(Block):
    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(pair[0]), pair[1]


def met(pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return pair[0] * pair[1]


def layers_of(kind: str) -> list[object]:
    end = [LayerSpec(nn.LayerNorm, WIDTH), LayerSpec(nn.Linear, WIDTH, WORDS, bias=False)]
    if kind == "skip":
        return [LayerSpec(First, WORDS, WIDTH), *(LayerSpec(Through) for _ in range(4)), met, *end]
    if kind == "tied":
        word = TiedLayerSpec("embed", nn.Embedding, WORDS, WIDTH)
        head = TiedLayerSpec("embed", nn.Embedding, WORDS, WIDTH, forward_fn=lambda m, x: linear(x, m.weight))
        return [word, *(LayerSpec(Block) for _ in range(4)), end[0], head]
    return [LayerSpec(nn.Embedding, WORDS, WIDTH), *(LayerSpec(Block) for _ in range(4)), *end]


class Peer:
    def __init__(self, kind: str, *, looped: bool = False, copies: bool = False, sharded: bool = False) -> None:
        if looped:
            raise NotAsked("it has no looped schedule")
        deepspeed.init_distributed("gloo", timeout=TIMEOUT)
        self.parts = 2 if copies or sharded else 1
        stages = dist.get_world_size() // self.parts
        self.module = PipelineModule(layers_of(kind), num_stages=stages, loss_fn=loss_of, partition_method="uniform")
        self.take_weights(Net(kind))
        size = SAMPLES // PARTS // self.parts
        config = {
            "train_batch_size": SAMPLES,
            "train_micro_batch_size_per_gpu": size,
            "gradient_accumulation_steps": PARTS,
            "zero_optimization": {"stage": 1 if sharded else 0},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = torch.optim.SGD(self.module.parameters(), lr=1.0)
        self.engine, *_ = deepspeed.initialize(config=config, model=self.module, optimizer=optimizer)

    def names(self) -> dict[str, torch.nn.Parameter]:
        """Return parameters by the names of the whole model: DeepSpeed numbers the layers."""
        order = ["tok_embeddings", *(f"layers.{i}" for i in range(4)), "norm", "lm_head"]
        found = {}
        for name, parameter in self.module.named_parameters():
            head, _, rest = name.partition(".")
            if head == "tied_modules":
                found["tok_embeddings.weight"] = parameter
                continue
            index = int(head) - (1 if self.skips() and int(head) > 5 else 0)
            found[f"{order[index]}.{rest}"] = parameter
        return found

    def skips(self) -> bool:
        return len(self.module._layer_specs) == 8

    @torch.no_grad()
    def take_weights(self, model: Net) -> None:
        whole = dict(model.named_parameters())
        for name, parameter in self.names().items():
            parameter.copy_(whole[name])

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        if self.parts > 1:
            mine = self.engine.grid.get_data_parallel_rank()
            x, y = x.chunk(self.parts)[mine], y.chunk(self.parts)[mine]
        self.before = self.weights()
        self.engine.train_batch(data_iter=iter(zip(x.tensor_split(PARTS), y.tensor_split(PARTS), strict=True)))

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return what SGD with a rate of 1 took away."""
        return {name: self.before[name] - value for name, value in self.weights().items()}

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.names().items()}

    def save(self, folder: Path, step: int) -> None:
        self.engine.save_checkpoint(str(folder), tag=str(step))

    def load(self, folder: Path) -> str:
        self.engine.load_checkpoint(str(folder))
        return "step 2"

    def shown(self) -> str:
        from deepspeed.runtime.pipe.schedule import TrainSchedule

        return "\n".join(str(step) for step in TrainSchedule(PARTS, 2, dist.get_rank()))
