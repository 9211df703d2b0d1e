"""Scripts of ranks whose layers are parts: one rank of `tp` is in another mode, has another batch, or skips a call."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import pipecompile as pc
from tests.distributed.mistakes import batches, error_of, square


class PartedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(4, 8), nn.Linear(8, 4), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> Any:
        return self.drop(self.down(torch.tanh(self.up(x))))


def _pipeline(n_stages: int) -> Any:
    mesh = init_device_mesh("cpu", (n_stages, 4 // n_stages), mesh_dim_names=("pp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(PartedBlock(), PartedBlock())
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return pc.compile(model, n_stages, mesh=mesh, loss_fn=square, n_microbatches=2, example_args=(batches(1)[0][0],))


def _said(rank: int, n_stages: int, of_one: Callable[[Any], object], back: Callable[[Any], object], part: int) -> Any:
    """Return the error of a step after rank 1 alone was changed, and whether the step after that is as the first."""
    pipe, (x, y) = _pipeline(n_stages), batches(2)
    losses = []
    for place in range(3):
        torch.manual_seed(5)
        if rank == 1 and place:
            (of_one if place == 1 else back)(pipe)
        number = part if rank == 1 and place == 1 else 0
        losses.append(error_of(lambda number=number: pipe.step(x[number], target=y[number]).item()))
    return [losses[1], losses[0] == losses[2]]


def beside_siblings(rank: int) -> Any:
    def nothing(_: Any) -> None:
        pass

    said = {}
    for n_stages in (2, 1):
        said[f"eval, {n_stages} in pp"] = _said(rank, n_stages, lambda p: p.eval(), lambda p: p.train(), 0)
        said[f"samples, {n_stages} in pp"] = _said(rank, n_stages, nothing, nothing, 1)
    return json.dumps(said)
