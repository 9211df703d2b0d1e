"""A small model that is easily recorded wrong, how to call it, and what there is to see of it afterwards."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

__all__ = ["Body", "Case", "Pair", "rows"]

Inputs = Callable[[int], tuple[Any, ...]]


def rows(*shape: int, requires_grad: bool = False) -> Inputs:
    """One tensor of so many samples, always the same one."""
    shape = shape or (4,)

    def inputs(size: int) -> tuple[torch.Tensor]:
        return (torch.randn(size, *shape, generator=torch.Generator().manual_seed(size)).requires_grad_(requires_grad),)

    return inputs


def nothing(model: nn.Module) -> Any:
    """What a model without a state of its own leaves."""


@dataclass(frozen=True)
class Case:
    """`build` makes the model anew, `left` tells what calls leave on it besides buffers and gradients.

    `refused` is what the message says when nobody can pipeline it; `around` is where it is called; `modes` are the modes that
    it is called in, one after the other.
    """

    build: Callable[[], nn.Module]
    inputs: Inputs = field(default_factory=rows)
    left: Callable[[Any], Any] = nothing
    refused: str = ""
    warns: str = ""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    modes: tuple[bool, ...] = (True, True, False)
    tolerance: float = 2e-5


class Body(nn.Module):
    """Three linear layers of width 4, and what the case does with them."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b, self.c, self.body = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), body

    def forward(self, x: Any) -> Any:
        return self.body(self, x)


class Pair(Body):
    """The same, with two inputs."""

    def forward(self, x: Any, k: Any) -> Any:
        return self.body(self, x, k)
