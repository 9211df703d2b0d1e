"""Scripts of two copies of a pipeline that read other values than each other beside their weights: what each rank is warned of."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed import init_device_mesh

import pipecompile as pc

FACTOR = [2.0]


class Scaled(nn.Module):
    """Two layers with a number between them, and a rank that nothing is computed with."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(4, 4), nn.Linear(4, 4), 1.0
        self.rank = rank

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.tanh(self.first(x)) * self.scale
        if self.rank == 0:
            pass
        return self.last(y)


def _doubled(self: Any, x: torch.Tensor) -> Any:
    return self.last(torch.sin(self.first(x)))


def _loss(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean() * FACTOR[0]


def _scale(model: Scaled, step: int) -> None:
    model.scale = 1.0 + step


def _forward(model: Scaled, step: int) -> None:
    model.forward = MethodType(_doubled, model)  # type: ignore[method-assign]


def _factor(_: Scaled, step: int) -> None:
    FACTOR[0] = 2.0 + step


def _nothing(*_: Any) -> None:
    pass


def _trained(rank: int, change: Callable[[Scaled, int], None], *, of_all: bool = False, first: float = 1.0) -> Any:
    """Step four times; change the model before the last two, on the second copy or `of_all`. Return what was warned of."""
    mesh, part = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")), rank // 2
    torch.manual_seed(0)
    model, FACTOR[0] = Scaled(rank), 2.0
    model.scale = first
    lengths = (3, 4, 5, 3) if part and change is _nothing else (3, 3, 3, 3)
    pin = {"first": 0, "last": 1}
    pipe = pc.compile(model, 2, mesh=mesh, loss_fn=_loss, n_microbatches=2, cost="analytic", pin=pin)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, length in enumerate(lengths):
            if step > 1 and (part or of_all):
                change(model, step)
            torch.manual_seed(step * 2 + part)
            pipe.step(torch.randn(8, length, 4))
    return [str(one.message) for one in caught if "copies of the pipeline" in str(one.message)]


def read_otherwise(rank: int) -> Any:
    return json.dumps(
        {
            "attribute": _trained(rank, _scale),
            "code": _trained(rank, _forward),
            "loss": _trained(rank, _factor),
            "from the start": _trained(rank, _nothing, first=1.0 + rank // 2),
            "on all": _trained(rank, _scale, of_all=True),
            "other lengths": _trained(rank, _nothing),
        }
    )
