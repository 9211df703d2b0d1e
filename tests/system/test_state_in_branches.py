"""Statements kept whole that write state of the model in some steps alone, and state that a forward writes after autograd saved it.

Eager runs forward and backward of one micro-batch after the other; a schedule runs forwards of later micro-batches in between, and a
recomputation reads state once more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pipecompile as pc
from tests.support.eager import accumulate, assert_same, square_loss


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.mid, self.outer = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.register_buffer("rows", torch.ones(6, 16))
        self.register_buffer("count", torch.zeros(6))

    def head(self, h: torch.Tensor) -> torch.Tensor:
        return self.outer(self.mid(h).relu())


class InBranch(Base):
    """The first step does not write."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        if x.abs().max() > 99:
            with torch.no_grad():
                self.rows[0].lerp_(h.mean(0), 0.1)
        return self.head(h * self.rows[0])


class InMethod(Base):
    @torch.no_grad()
    def update(self, x: torch.Tensor, h: torch.Tensor) -> None:
        if x.abs().max() > 99:
            self.rows[0].lerp_(h.mean(0), 0.1)
            self.count += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        self.update(x, h)
        return self.head(h + self.rows[0] * self.count.mean())


class ByText(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        for name in ("count", "rows"):
            if x.abs().max() > 99:
                getattr(self, name).mul_(0.9)
        return self.head(h + self.rows[0])


class Plain(Base):
    """Tensors that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.stats = torch.ones(16), {"n": torch.zeros(())}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        if x.abs().max() > 99:
            self.table.mul_(0.9)
            self.stats["n"] += 1
        return self.head(h * self.table + self.stats["n"])


class Codebook(Base):
    """The rows that are written are those that the data choose; `unique`, a function that is kept whole, is called in the statement."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        nearest = torch.cdist(h, self.rows).argmin(1)
        if self.training:
            with torch.no_grad():
                for row in nearest.unique().tolist():
                    self.rows[row].lerp_(h[nearest == row].mean(0), 0.1)
        return self.head(h + (self.rows[nearest] - h).detach())


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("top", torch.ones(()))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        largest = h.detach().abs().max()
        if largest > self.top:
            self.top.copy_(largest)
        return h / self.top


class Gates(Base):
    """A submodule is kept whole, and reads its own state after it has written it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gate(self.inner(x)))


class Always(Base):
    """Nothing is kept whole: autograd saves a buffer that the next micro-batch writes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        self.rows.mul_(1.1)
        return self.head(h * self.rows[0])


class Weight(Base):
    """A parameter is clamped in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((16,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        with torch.no_grad():
            self.scale.mul_(0.9)
        return self.head(h * self.scale)


class Region(Base):
    """A region of the model's own checkpointing reads a buffer that the forward writes."""

    def scaled(self, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(h) * self.rows[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        self.rows.mul_(1.05)
        return self.head(checkpoint(self.scaled, h, use_reentrant=False))


class Experts(Base):
    """The data choose experts with running statistics, of which the first step may use none; the statement alone reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, out = self.inner(x), torch.zeros(len(x), 16)
        chosen = (x.sum(1) / 200).long().clamp(0, 3)
        for expert in chosen.unique().tolist():
            rows = chosen == expert
            out[rows] = self.experts[expert](torch.cat([h[rows], 2 * h[rows]]))[: int(rows.sum())]
        return self.head(out)


MODELS: list[Callable[[], Base]] = [InBranch, InMethod, ByText, Plain, Codebook, Gates, Always, Weight, Region, Experts]


@pytest.mark.sampled(24)
@pytest.mark.parametrize("dispatch", ["inline", "threads"])
@pytest.mark.parametrize("mode", ["never", "always", "except_last"])
@pytest.mark.parametrize("n_stages", [2, 3])
@pytest.mark.parametrize("make", MODELS)
def test_steps_are_equal_to_eager(make: Callable[[], Base], n_stages: int, mode: str, dispatch: str) -> None:
    torch.manual_seed(0)
    model = make()
    twin = copy.deepcopy(model)
    options = {"n_microbatches": 4, "loss_fn": square_loss, "schedule": "1f1b", "cost": "analytic"}
    pipe = pc.compile(model, n_stages, checkpoint=mode, dispatch=dispatch, **options)
    for scale in (1, 100, 200, 1):
        x = torch.rand(8, 8) * scale
        torch.testing.assert_close(pipe.step(x), accumulate(twin, x, 4), rtol=1e-5, atol=1e-6)
        assert_same(model, twin)
        model.zero_grad(), twin.zero_grad()
