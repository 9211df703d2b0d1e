"""Part 3 of `make gpu`: one card cut into partitions of its multiprocessors: pipeline devices that really run side by side.

    python benchmarks/gpu_partitions.py [--dry] [probe ...]

The base is the plain loop over micro-batches on one partition, what one device of the pipeline would take alone. Costs are measured
on one partition, and the simulated speed-up is for as many devices. With `--dry`, the devices share the CPU.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from gpu_probes import Card, Finding, Part, Skipped
from torch import nn

import pipecompile as pc
from pipecompile.driver.inspection import Inspection
from pipecompile.runtime.launch_timeline import simulate_launches
from pipecompile.torch_private.accelerators import OnStreams

PART = Part("partitions", "A pipeline on partitions of one card, against the simulated step.")
PARTS, COUNT = 4, 16
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = (
            part.view(b, t, self.heads, d // self.heads).transpose(1, 2)
            for part in self.qkv(self.first(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.second(x))))


def gpt(card: Card) -> tuple[nn.Module, torch.Tensor, torch.Tensor, Loss]:
    width, layers, length = card.sizes(2048, 32), card.sizes(16, 4), card.sizes(1024, 8)
    model = nn.Sequential(*[Block(width, card.sizes(16, 4)) for _ in range(layers)])
    dtype = torch.float32 if card.dry else torch.bfloat16
    x = torch.randn(32, length, width, device=card.device, dtype=dtype)
    return model.to(card.device, dtype), x, torch.randn_like(x), F.mse_loss


def resnet(card: Card) -> tuple[nn.Module, torch.Tensor, torch.Tensor, Loss]:
    model = torchvision.models.resnet18() if card.dry else torchvision.models.resnet101()
    n, side = card.sizes(256, 32), card.sizes(224, 16)
    x = torch.randn(n, 3, side, side, device=card.device)
    return model.to(card.device), x, torch.randint(0, 1000, (n,), device=card.device), F.cross_entropy


@cache
def devices(dry: bool) -> tuple[Any, ...]:
    """Return the partitions of the card; on the CPU, devices that share it."""
    if dry:
        return (torch.device("cpu"),) * PARTS
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        try:
            return tuple(pc.partitions("cuda:0", PARTS))
        except RuntimeWarning as reason:
            raise Skipped(str(reason)) from None


def on(part: Any) -> AbstractContextManager[Any]:
    return OnStreams(part.stream) if isinstance(part, pc.CardPartition) else nullcontext()


def seconds(card: Card, step: Callable[[], object]) -> float:
    taken = []
    for turn in range(card.sizes(8, 1) + 1):
        card.synchronize()
        start = perf_counter()
        step()
        card.synchronize()
        if turn:
            taken.append(perf_counter() - start)
    return median(taken)


def compared(card: Card, model: nn.Module, x: torch.Tensor, y: torch.Tensor, loss: Loss, schedule: str) -> Finding:
    parts = devices(card.dry)
    alone, stages = copy.deepcopy(model), PARTS * (2 if schedule in ("interleaved", "zbv") else 1)

    def plain() -> None:
        with on(parts[0]):
            for a, b in zip(x.chunk(COUNT), y.chunk(COUNT), strict=True):
                (loss(alone(a), b) / COUNT).backward()

    pipe = pc.compile(
        copy.deepcopy(model), stages, example_args=(x,), n_microbatches=COUNT, loss_fn=loss, schedule=schedule, batch_norm="each",
        devices=list(parts), cost="analytic" if card.dry else "profile", dispatch="inline",
    )  # fmt: skip
    card.synchronize()
    equal = _equal(card, pipe, alone, plain, x, y)
    inspection: Inspection = pipe._inspection()
    said, launched = pipe.simulate(), simulate_launches(pipe.program, **inspection.costs)
    speed_up = seconds(card, plain) / seconds(card, lambda: pipe.step(x, target=y))
    measured = pipe.measured
    assert measured is not None
    text = f"speed-up {speed_up:.2f}, simulated {said.busy / said.makespan:.2f}; bubble {measured.bubble:.1%}, simulated {said.bubble:.1%}"
    is_good = speed_up >= 0.9 * said.busy / said.makespan and abs(measured.bubble - said.bubble) <= 0.03
    return Finding(f"{text}; launches {launched.makespan / said.makespan:.3f}", equal and (card.dry or is_good))


def _equal(card: Card, pipe: pc.Pipeline, alone: nn.Module, plain: Callable[[], None], x: Any, y: Any) -> bool:
    plain()
    pipe.step(x, target=y)
    card.synchronize()
    pairs = [(a.grad, b.grad) for a, b in zip(pipe.model.parameters(), alone.parameters(), strict=True)]
    return all(((a - b).abs().max() <= 0.05 * b.abs().max() + 1e-6).item() for a, b in pairs)  # type: ignore[operator,union-attr]


def _probes() -> None:
    for name, case in (("gpt", gpt), ("resnet", resnet)):
        for schedule in ("1f1b", "zb-h1", "gpipe", "interleaved", "eager-1f1b", "zbv"):

            def probe(card: Card, case: Any = case, schedule: str = schedule) -> Finding:
                if case is resnet and card.dry and schedule != "1f1b":
                    raise Skipped("one schedule is enough for a dry run of this model")
                return compared(card, *case(card), schedule)

            probe.__name__ = f"{name}_{schedule}"
            PART.probe("0.9 of the simulated speed-up, bubble within 3 points")(probe)


_probes()

if __name__ == "__main__":
    PART.main()
