"""Cases of copies of a pipeline whose batches take other branches of the model: their recordings have one program on other weights. Run on
four ranks, as in cases.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipecompile as pc
from tests.distributed.cases import mesh_of
from tests.distributed.meshes import distance_of


class Tasks(nn.Module):
    """A trunk with a head per task; all heads have one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor, task: int = 0) -> Tensor:
        y: Tensor = self.heads[task](self.trunk(x))
        return y


def tasks(copies: str) -> dict[str, float]:
    """Return how far losses and gradients are off where each of two copies has a task, and where both have one of them."""
    torch.manual_seed(6)
    model, index = Tasks().double(), dist.get_rank() // 2
    eager, x = copy.deepcopy(model), torch.randn(2, 8, 6).double()
    pipe = pc.compile(
        model, 2, mesh=mesh_of((2, 2), copies, "pp"), loss_fn=nn.functional.mse_loss, n_microbatches=2, cost="analytic",
        example_args=(x[0],),
    )  # fmt: skip
    worst = {"loss": 0.0, "worst": 0.0}
    for chosen in ((0, 1), (1, 1), (1, 0)):
        for one in (pipe, eager):
            one.zero_grad()
        loss = pipe.step(x[index], chosen[index], target=x[index]).item()
        for part, task in zip(x, chosen, strict=True):
            share = nn.functional.mse_loss(eager(part, task), part) / 2
            share.backward()
            loss -= share.item()
        expected = dict(eager.named_parameters())
        off = [
            distance_of(one.grad, expected[name].grad)
            for name, one in pipe.named_parameters()
            if expected[name].grad is not None or one.grad is not None
        ]
        worst = {"loss": max(worst["loss"], abs(loss)), "worst": max(worst["worst"], *off)}
    return worst


class Domains(nn.Module):
    """A layer of statistics per domain; the second is of no recording until a batch has its domain, so it lives with the last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norms = nn.ModuleList(nn.BatchNorm1d(6) for _ in range(2))

    def forward(self, x: Tensor, domain: int = 0) -> Tensor:
        y: Tensor = self.last(self.norms[domain](self.first(x)))
        return y


def domains() -> float:
    """Return how far deferred statistics are off where each of two copies has a domain, or no samples, or both have one of them."""
    torch.manual_seed(7)
    model, index = Domains().double(), dist.get_rank() // 2
    eager, x = copy.deepcopy(model), torch.randn(2, 8, 6).double() * torch.tensor([1.0, 3.0]).view(2, 1, 1)
    pipe = pc.compile(
        model, 2, mesh=mesh_of((2, 2), "dp", "pp"), loss_fn=nn.functional.mse_loss, n_microbatches=2, cost="analytic",
        example_args=(x[0],), batch_norm="deferred",
    )  # fmt: skip
    worst = 0.0
    for chosen in ((0, 1), (1, 1), (1, None), (None, 1), (1, 0)):
        own = x[index] if chosen[index] is not None else x[index][:0]
        pipe.step(own, chosen[index] or 0, target=own)
        for domain in {*chosen} - {None}:
            eager(torch.cat([part for part, one in zip(x, chosen, strict=True) if one == domain]), domain)
        state = pipe.full_state_dict()
        worst = max(worst, *(float((state[name] - one).abs().max()) for name, one in eager.named_buffers()))
    return worst


CASES: dict[str, Callable[[], Any]] = {
    "tasks of copies": lambda: tasks("dp"),
    "tasks of copies, sharded": lambda: tasks("dp_shard"),
    "domains of copies": domains,
}
"""Cases by name, in the order in which ranks run them."""
