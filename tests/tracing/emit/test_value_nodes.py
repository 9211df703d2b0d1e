from __future__ import annotations

import enum

import numpy as np
import torch
from torch import nn

from pipecompile.tracing import trace


class Reduction(str, enum.Enum):
    SUM = "sum"


class Width(enum.IntEnum):
    TWO = 2


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.a(x), x, reduction=Reduction.SUM)
        return loss * np.float64(0.5) + torch.full((Width.TWO,), 1.0).clamp(max=float("inf")).sum() * np.float32(1.5)


def rows(size: int) -> tuple[torch.Tensor]:
    return (torch.randn(size, 4, generator=torch.Generator().manual_seed(size)),)


def test_numbers_and_strings_of_derived_classes_are_written_as_what_they_are(agrees):
    graph = agrees(Loss(), rows)
    kinds = {type(leaf) for node in graph.graph.nodes for leaf in (*node.args, *node.kwargs.values())}
    assert kinds.isdisjoint({Reduction, Width, np.float64})


def test_slices_and_nested_containers_hold_nodes():
    class Slices(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            half = x.shape[0] // 2
            return torch.cat([x[half:], x[:half][:, [1, 0]]], 0)

    graph, x = trace(Slices(), torch.randn(4, 2)), torch.randn(7, 2)
    assert torch.equal(graph(x), Slices()(x))


def test_structures_come_apart_only_where_there_are_tensors(agrees):
    class Mixed(nn.Module):
        def forward(self, x: torch.Tensor) -> object:
            values, indices = x.max(1)
            return {"values": values, "pair": (indices, None, [x.mean(), 3])}

    agrees(Mixed(), rows)
