"""The models whose times are predicted and measured: as they are published, small enough for two cores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from partition_models import UNet
from torch import nn

import pipecompile as pc


@dataclass(frozen=True, slots=True)
class Subject:
    """A model with a mini-batch of four micro-batches."""

    model: nn.Module
    x: torch.Tensor
    target: torch.Tensor | None = None
    kwargs: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def compile(self, n_stages: int, **options: Any) -> pc.Pipeline:
        options = {"devices": ["cpu"] * n_stages, "cost": "profile"} | options
        return pc.compile(
            self.model, n_stages, example_args=(self.x,), example_kwargs=self.kwargs, n_microbatches=4,
            loss_fn=None if self.target is None else F.cross_entropy, **options,
        )  # fmt: skip

    def step(self, pipe: pc.Pipeline) -> None:
        pipe.step(self.x, target=self.target, **self.kwargs)


def images(model: nn.Module, samples: int, size: int) -> Subject:
    return Subject(model, torch.randn(samples, 3, size, size), torch.randint(0, 1000, (samples,)))


def resnet(name: str, samples: int, size: int) -> Subject:
    import torchvision

    return images(torchvision.models.get_model(name), samples, size)


def unet() -> Subject:
    """Depth 5, two classes a pixel."""
    return Subject(UNet(width=16), torch.randn(8, 3, 96, 96), torch.randint(0, 2, (8, 96, 96)))


def vit() -> Subject:
    import timm

    return images(timm.create_model("vit_small_patch16_224", img_size=96), 8, 96)


def gpt2() -> Subject:
    """Six layers that are 384 wide; the head has the weight of the embedding, and the model its own loss."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=8000, n_positions=128, n_embd=384, n_layer=6, n_head=6, use_cache=False)
    words = torch.randint(0, 8000, (4, 128))
    return Subject(GPT2LMHeadModel(config).train(), words, kwargs={"labels": words})


SUBJECTS: Mapping[str, Callable[[], Subject]] = {
    "ResNet-18, 96 px": lambda: resnet("resnet18", 8, 96),
    "ResNet-50, 64 px": lambda: resnet("resnet50", 8, 64),
    "ResNet-101, 64 px": lambda: resnet("resnet101", 8, 64),
    "U-Net, depth 5": unet,
    "ViT-small, 96 px": vit,
    "GPT-2, 6 layers": gpt2,
}
