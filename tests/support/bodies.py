"""A model of three linear layers and whatever a test does with them, and its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["Body", "rows"]


class Body(nn.Module):
    """`body(self, *inputs)` is its forward."""

    def __init__(self, body: Callable[..., Any], width: int = 4) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(width, width) for _ in range(3))
        self.register_buffer("mean", torch.zeros(width))
        self.body = body

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


def rows(*shape: int) -> Callable[[int], tuple[torch.Tensor]]:
    """Inputs of so many samples, each of this shape."""
    return lambda size: (torch.randn(size, *shape, generator=torch.Generator().manual_seed(size)),)
