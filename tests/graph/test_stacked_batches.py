"""Batches that are put behind each other, go through the same layers and are divided again keep their samples apart."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.batching.merging import MergeKind
from pipecompile.graph.batch_flow import BatchFlow


def noise(z: torch.Tensor) -> torch.Tensor:
    """Return a number per row, as a drop path draws it."""
    return torch.empty(len(z), 1).bernoulli_(0.5).div_(0.5)


class Twins(nn.Module):
    """Compare two images, which go through one encoder of more calls than an experiment takes."""

    def __init__(self, compared: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        layers = [
            nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.InstanceNorm2d(2), nn.ReLU(inplace=True)) for _ in range(5)
        ]
        self.encoder, self.head, self.compared = nn.Sequential(*layers), nn.Linear(32, 4), compared

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = self.encoder(torch.cat([x, y], dim=0))
        z = self.head(F.dropout(z.flatten(1), 0.0))
        return self.compared(z, x, y)


def images(samples: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, 2, 4, 4), torch.randn(samples, 2, 4, 4)


def kind(compared: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> MergeKind:
    flow = BatchFlow(pc.trace(Twins(compared), *images()))
    (node,) = flow.graph.graph.output_node().args[0]  # type: ignore[misc]
    return flow.rule(node).kind  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "compared",
    [
        lambda z, x, y: torch.sub(*z.chunk(2)),
        lambda z, x, y: torch.sub(*torch.split(z, [len(x), len(y)])),
        lambda z, x, y: z[: len(x)] * z[len(x) :],
        lambda z, x, y: torch.sub(*(z * noise(z)).chunk(2)),
        lambda z, x, y: (z[: len(x)] * z[len(x) :]) * torch.rand(len(z), 1).floor_().chunk(2)[0],
        lambda z, x, y: torch.addcmul(*torch.cat([z, x.flatten(1)[:, :4]]).relu_().chunk(3)),
        lambda z, x, y: torch.sub(*torch.cat([z, z[:, :1].expand_as(z)], -1).chunk(2)),
    ],
)
def test_batches_that_are_divided_again_are_joined(
    compared: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    assert kind(compared) is MergeKind.JOINED


@pytest.mark.parametrize(
    "compared",
    [
        lambda z, x, y: z,
        lambda z, x, y: z[1 : len(x) + 1],
        lambda z, x, y: z.flip(0).chunk(2)[0],
        lambda z, x, y: (z - z.mean(0)).chunk(2)[0],
        lambda z, x, y: z.index_fill_(0, torch.tensor([1]), 0.0).chunk(2)[0],
        lambda z, x, y: z.reshape(len(x), 8),
        lambda z, x, y: torch.cat([z, z.flip(0)], -1).chunk(2)[0],
        lambda z, x, y: torch.cat([z, torch.cat([y, x]).flatten(1)], -1).chunk(2)[0] - z.mean(),
        lambda z, x, y: (z * noise(z).cumsum(0)).chunk(2)[0],
        lambda z, x, y: (z * noise(z).view(-1, 2).cumsum_(1).view(-1, 1)).chunk(2)[0],
    ],
)
def test_other_uses_of_stacked_batches_are_not_joined(
    compared: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    assert kind(compared) is MergeKind.COMPUTED


def test_a_step_and_a_call_of_such_a_model_say_nothing() -> None:
    model = Twins(lambda z, x, y: torch.sub(*z.chunk(2)))
    pipe = pc.compile(model, 2, n_microbatches=2, loss_fn=F.mse_loss, devices=["cpu", "cpu"], cost="analytic")
    with warnings.catch_warnings():
        warnings.simplefilter("error", pc.RecordingWarning)
        loss = pipe.step(*images(8), target=torch.randn(8, 4))
        assert loss.isfinite()
        x, y = images(8)
        parts = [model(*part) for part in zip(x.chunk(2), y.chunk(2), strict=True)]
        assert torch.equal(pipe(x, y), torch.cat(parts))
