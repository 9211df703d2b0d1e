"""Layers and losses with state, of which random models are made: counters, buffers, queues, hooks, terms for the loss."""

from __future__ import annotations

import math
from collections import deque
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["PARTS", "AuxiliaryLoss", "CountingLoss", "Hooked", "Net", "is_near", "state_of"]

WIDTH, CLASSES = 6, 3


class Part(nn.Module):
    """A layer; `set_up` makes the state, also that of a copy whose hooks refer to the original."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.set_up()

    def set_up(self) -> None:
        """Make the state."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


class Counts(Part):
    def set_up(self) -> None:
        self.calls, self.last = 0, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.layer(x)
        self.last = y.detach().mean()
        return y


class CountsWhole(Part):
    """Is kept whole: it branches on a value."""

    def set_up(self) -> None:
        self.calls, self.seen, self.sums, self.config = (
            0,
            deque(maxlen=3),
            {},
            SimpleNamespace(total=torch.zeros(WIDTH)),
        )

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.sums[self.calls % 3] = x.detach().sum()
        self.config.total = self.config.total + x.detach().mean(0)
        if x.mean() > 0:
            self.seen.append(self.calls)
        return self.layer(x) * (1 + 0.1 * (self.calls % 3))


class Averages(Part):
    def set_up(self) -> None:
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.layer(x) - self.mean.clone()


class Replaces(Part):
    def set_up(self) -> None:
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        return self.layer(x) + self.mean


class Remembers(Part):
    """Reads what earlier micro-batches left."""

    def set_up(self) -> None:
        self.queue: Any = deque(maxlen=2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        for old in self.queue:
            y = y + 0.1 * old.mean(0)
        self.queue.append(x.detach())
        return y if y.sum() < 1e9 else x


class ScalesGradients(Part):
    """A hook on a gradient reads what the forward of its micro-batch left."""

    def set_up(self) -> None:
        self.scale = torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.scale = y.detach().abs().mean()
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * self.scale)
        return y


class Hooked(Part):
    """A hook of a layer counts, and changes the output."""

    def set_up(self) -> None:
        self.calls = 0

        def hook(_layer: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
            self.calls += 1
            return output * (1 + 0.1 * (self.calls % 2))

        self.layer._forward_hooks.clear()
        self.layer.register_forward_hook(hook)


class Balances(Part):
    """Leaves a term for the loss beside a mixture of experts."""

    def set_up(self) -> None:
        self.gate, self.aux = nn.Linear(WIDTH, 2), None

    def forward(self, x: Tensor) -> Any:
        gates = self.gate(x).softmax(-1)
        self.aux = gates.mean(0).square().sum()
        return self.layer(x) * gates[:, :1]


class Branches(Part):
    """Leaves a term for the loss behind layers of its own, in a piece kept whole."""

    def set_up(self) -> None:
        self.branch, self.aux = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)), None

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.aux = self.branch(y).square().mean()
        return y.sigmoid() if y.sum() < 1e9 else x


PARTS = (
    Part, Counts, CountsWhole, Averages, Replaces, Remembers, ScalesGradients, Hooked, Balances, Branches,
)  # fmt: skip


class Net(nn.Module):
    """Parts one after the other, some with a residual."""

    def __init__(self, parts: list[type[Part]], residuals: set[int]) -> None:
        super().__init__()
        self.parts, self.residuals = nn.ModuleList(part() for part in parts), residuals
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for place, part in enumerate(self.parts):
            x = x + part(x) if place in self.residuals else part(x)
        return self.head(x)


class CountingLoss(nn.Module):
    """Counts, and keeps averages."""

    def __init__(self, _net: Net) -> None:
        super().__init__()
        self.calls, self.mean = 0, 1.0
        self.register_buffer("centre", torch.zeros(CLASSES))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        self.centre.mul_(0.9).add_(output.detach().mean(0) * 0.1)
        loss = F.cross_entropy(output - self.centre, target)
        self.mean = 0.9 * self.mean + 0.1 * loss.item()
        return loss / self.mean


class AuxiliaryLoss:
    """Adds the terms that parts have left, and counts."""

    def __init__(self, net: Net) -> None:
        self.net, self.calls = net, 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        left = [part.aux for part in self.net.parts if getattr(part, "aux", None) is not None]
        return F.cross_entropy(output, target) + 0.1 * sum(left)


def state_of(value: Any) -> Any:
    """Return the state of a model, a loss and what they hold as numbers, lists and dicts."""
    if isinstance(value, Tensor):
        return value.detach().flatten().tolist()
    if isinstance(value, (list, tuple, deque, nn.ModuleList)):
        return [state_of(one) for one in value]
    if isinstance(value, dict):
        return {str(key): state_of(one) for key, one in value.items()}
    if isinstance(value, (Net, Part, CountingLoss, AuxiliaryLoss, SimpleNamespace)):
        buffers = dict(value.named_buffers(recurse=False)) if isinstance(value, nn.Module) else {}
        children = {"parts": value.parts} if isinstance(value, Net) else {}
        own = {name: one for name, one in vars(value).items() if not name.startswith("_") and name != "net"}
        return state_of(own | buffers | children)
    return value if isinstance(value, (int, float, str, bool)) else None


def is_near(one: Any, other: Any) -> bool:
    """Return whether two states are the same but for roundings."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-7, abs_tol=1e-9)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_near, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_near(one[key], other[key]) for key in one)
    return bool(one == other)
