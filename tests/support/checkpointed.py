"""Models with regions that their author checkpoints, and pipelines of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pipecompile as pc
from tests.support.eager import square_loss

__all__ = ["Block", "Functional", "Net", "built", "compiled"]


class Block(nn.Module):
    def __init__(self, width: int, *, norm: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width) if norm else nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu_())


class Net(nn.Module):
    """Four blocks, each a region, between two layers that are not."""

    def __init__(self, reentrant: bool, *, norm: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.reentrant = nn.Linear(4, 8), nn.Linear(8, 3), reentrant
        self.blocks = nn.ModuleList(Block(8, norm=norm) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


def built(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Return a model and its copy."""
    torch.manual_seed(0)
    model = make()
    return model, copy.deepcopy(model)


def compiled(model: nn.Module, x: torch.Tensor, n_stages: int = 3, **keywords: Any) -> pc.Pipeline:
    settings = {"n_microbatches": 1, "loss_fn": square_loss, "cost": "analytic", "batch_norm": "each"} | keywords
    return pc.compile(model, n_stages, example_args=(x,), devices=["cpu"] * n_stages, **settings)


class Functional(nn.Module):
    """Two linear layers, and a forward of the test's own."""

    def __init__(self, body: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.norms = nn.Linear(4, 4), nn.Linear(4, 4), nn.ModuleList(nn.BatchNorm1d(4) for _ in "ab")
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)
