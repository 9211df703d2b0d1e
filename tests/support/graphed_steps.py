"""Pipelines whose steps are CUDA graphs on an emulated device, beside the same pipelines without graphs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipecompile as pc

__all__ = ["both", "compiled", "data", "equal", "net", "told", "trained"]

PLAIN: dict[str, Any] = {
    "cost": "analytic", "devices": ["cpu"] * 2, "n_microbatches": 4, "dispatch": "inline", "batch_norm": "each",
    "loss_fn": F.cross_entropy, "check": False,
}  # fmt: skip

Change = Callable[[pc.Pipeline, int], Any]


def net(*between: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), *(between or (nn.Tanh(),)), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def data(step: int, samples: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(samples, 8, generator=generator), torch.randint(0, 4, (samples,), generator=generator)


def compiled(model: nn.Module, n_stages: int = 2, **options: Any) -> pc.Pipeline:
    return pc.compile(model, n_stages, **({"cuda_graphs": "step"} | PLAIN | options))


def both(model: nn.Module, **options: Any) -> tuple[pc.Pipeline, pc.Pipeline]:
    """A pipeline with graphs, and the same without."""
    plain = copy.deepcopy(model)
    return compiled(model, **options), compiled(plain, **options, cuda_graphs=False)


def trained(pipe: pc.Pipeline, steps: int = 5, change: Change | None = None) -> list[Tensor]:
    """Losses, gradients and weights. Every second step adds to the gradients before; gradients of a step are kept."""
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    found: list[Tensor] = []
    kept: list[Any] = []
    for step in range(steps):
        if change is not None:
            change(pipe, step)
        x, target = data(step)
        found.append(pipe.step(x, target=target))
        if step % 2:
            optimizer.step()
            kept += [p.grad for p in pipe.parameters()] if step % 4 == 1 else []
            optimizer.zero_grad(set_to_none=step % 4 == 1)
    found += [p.grad.clone() for p in pipe.parameters() if p.grad is not None]
    found += [gradient for gradient in kept if gradient is not None]
    return [*found, *pipe.parameters(), *pipe.buffers()]


def equal(mine: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))


@contextmanager
def told(*reasons: str) -> Iterator[None]:
    """Each of the reasons why a step is not one graph is told once, and no other."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    found = [str(each.message) for each in caught if "the step is not one CUDA graph" in str(each.message)]
    assert len(found) == len(reasons), found
    for reason, message in zip(reasons, found, strict=True):
        assert reason in message
