"""Cases of a model that changes between steps. Run on four ranks, as in cases.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import pipecompile as pc
from tests.distributed.cases import pair_mesh
from tests.distributed.meshes import mesh_of

WIDTH = 4


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.scale = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return x


def freeze(model: nn.Module, *, trains: bool) -> None:
    """Freeze the third layer, or train it again. On a rank, `named_parameters` has the parameters of its own stages."""
    for name, parameter in model.named_parameters():
        if name.startswith("layers.2."):
            parameter.requires_grad_(trains)


def changed(mesh: Any) -> Any:
    """Train with a layer of one rank frozen, then with another scale, then as at the beginning; call in between.

    Return, per step, the largest difference of gradients to eager; then the number of recordings and the differences of calls.
    """
    torch.manual_seed(4)
    eager, x = Scaled().double(), torch.randn(8, WIDTH).double()
    model = copy.deepcopy(eager)
    pipe = pc.compile(
        model, 2, mesh=mesh, example_args=(x,), n_microbatches=2, loss_fn=lambda y: y.square().mean(), cost="analytic"
    )
    off, calls = [], []
    for trains, scale in ((True, 1.0), (False, 1.0), (False, 1.5), (True, 1.0), (False, 1.0)):
        freeze(pipe, trains=trains)
        freeze(eager, trains=trains)
        model.scale = eager.scale = scale
        for each in (pipe, eager):
            each.zero_grad()
        pipe.step(x)
        eager(x).square().mean().backward()
        expected = dict(eager.named_parameters())
        off.append(max(_distance(parameter, expected[name]) for name, parameter in pipe.named_parameters()))
        with torch.no_grad():
            calls.append((pipe(x) - eager(x)).abs().max().item())
    return {"off": off, "calls": calls, "recordings": len(pipe.explain().kept)}


def _distance(parameter: torch.Tensor, expected: torch.Tensor) -> float:
    if parameter.grad is None or expected.grad is None:
        return 0.0 if parameter.grad is expected.grad else 9.0
    gradient = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
    return float((gradient - expected.grad).abs().max())


CASES: dict[str, Callable[[], Any]] = {
    "changed": lambda: changed(pair_mesh()),
    "changed parts": lambda: changed(mesh_of((2, 2), "dp_shard", "pp")),
}
"""Cases by name, in the order in which ranks run them."""
