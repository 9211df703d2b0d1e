"""Cases: a small model that is easily recorded wrong, its calls, and what they leave on it."""

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
    """Return a function of the number of samples, which returns one tensor `(samples, *shape)`, the same for each number."""
    shape = shape or (4,)

    def inputs(size: int) -> tuple[torch.Tensor]:
        return (torch.randn(size, *shape, generator=torch.Generator().manual_seed(size)).requires_grad_(requires_grad),)

    return inputs


def nothing(model: nn.Module) -> Any:
    """Return None: the model leaves nothing on itself."""


@dataclass(frozen=True)
class Case:
    """One case.

    build    makes the model anew
    left     returns what calls leave on the model besides buffers and gradients
    refused  a pattern of the message with which the model is refused; "" if it is not
    around   a context for the calls
    modes    the training modes of the calls, one after the other
    mixes    whether samples meet in the model, so that a pipeline equals the loop over one micro-batch only
    merged   whether `pipe(x)` of two micro-batches leaves what the loop over one leaves
    """

    build: Callable[[], nn.Module]
    inputs: Inputs = field(default_factory=rows)
    left: Callable[[Any], Any] = nothing
    refused: str = ""
    warns: str = ""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    modes: tuple[bool, ...] = (True, True, False)
    tolerance: float = 2e-5
    mixes: bool = False
    merged: bool = False


class Body(nn.Module):
    """Three linear layers of width 4, and a forward of the case's own."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b, self.c, self.body = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), body

    def forward(self, x: Any) -> Any:
        return self.body(self, x)


class Pair(Body):
    """A Body with two inputs."""

    def forward(self, x: Any, k: Any) -> Any:
        return self.body(self, x, k)
