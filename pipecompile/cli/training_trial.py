"""A short training on random data, and the same training without a pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pipecompile.costs.optimizer_bytes import optimizer_state
from pipecompile.errors import InputError
from pipecompile.torch_private.accelerators import random_state

if TYPE_CHECKING:
    from pipecompile.pipeline import Pipeline

__all__ = ["Trial", "eager_step", "optimizer_named", "synthetic_loss", "train"]

_LEARNING_RATE = 1e-3

MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Trial:
    """Loss and seconds of every step, of the pipeline and of the eager loop if there is one.

    The differences are the largest of all steps and parameters. `random`: the model draws random numbers, as dropout does, so
    pipeline and eager loop need not agree.
    """

    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    eager_losses: tuple[float, ...] = ()
    eager_seconds: tuple[float, ...] = ()
    gradient_difference: float = 0.0
    largest_gradient: float = 0.0
    random: bool = False

    @property
    def loss_difference(self) -> float:
        pairs = zip(self.losses, self.eager_losses, strict=False)
        return max((abs(a - b) for a, b in pairs), default=0.0)


@dataclass(frozen=True, slots=True)
class _Side:
    """A model, its optimizer, and the function that computes its gradients and loss."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], torch.Tensor]

    def run(self, seed: int) -> tuple[float, float]:
        """Return loss and seconds of one step. The gradients stay for comparison."""
        torch.manual_seed(seed)
        self.optimizer.zero_grad()
        start = time.perf_counter()
        return float(self.step().detach()), time.perf_counter() - start


def train(
    pipe: Pipeline,
    model: torch.nn.Module,
    twin: torch.nn.Module | None,
    args: Sequence[torch.Tensor],
    steps: int,
    seed: int,
    optimizer: MakeOptimizer,
) -> Trial:
    """Train on one mini-batch with the pipeline of `model` and, unless None, with the unchanged copy `twin`."""
    fast = _Side(model, optimizer(model.parameters()), lambda: pipe.step(*args))
    if twin is None:
        losses, seconds = zip(*_alone(fast, steps, seed), strict=True)
        return Trial(losses, seconds)
    device = torch.device(pipe.devices[0])
    twin = twin.to(device)
    near = [arg.to(device) for arg in args]
    slow = _Side(twin, optimizer(twin.parameters()), lambda: eager_step(twin, near, pipe.schedule.n_microbatches))
    return _together(fast, slow, steps, seed, device)


def optimizer_named(name: str) -> MakeOptimizer:
    """Return the factory of an optimizer of torch, by the names of `compile(optimizer=...)`. Raise InputError for other names."""
    optimizer_state(name)
    key = name.lower().replace("_", "").replace("-", "")
    variants: dict[str, tuple[str, dict[str, Any]]] = {
        "momentum": ("sgd", {"momentum": 0.9}),
        "amsgrad": ("adam", {"amsgrad": True}),
    }
    kind, options = variants.get(key, (key, {}))
    known = {each.lower(): getattr(torch.optim, each) for each in torch.optim.__all__ if each != "SparseAdam"}
    if kind not in known:
        raise InputError(
            f"run cannot train with {name!r}", why="torch has none for these gradients", hint="--optimizer adam"
        )
    return partial(known[kind], lr=_LEARNING_RATE, **options)


def _alone(side: _Side, steps: int, seed: int) -> Iterator[tuple[float, float]]:
    for step in range(steps):
        yield side.run(seed + step)
        side.optimizer.step()


def _together(fast: _Side, slow: _Side, steps: int, seed: int, device: torch.device) -> Trial:
    runs, differences, random = [], [], False
    for step in range(steps):
        ours = fast.run(seed + step)
        torch.manual_seed(seed + step)
        before = random_state(device)
        theirs = slow.run(seed + step)
        random = random or not torch.equal(before, random_state(device))
        runs.append((*ours, *theirs))
        differences.append(_gradient_difference(fast.model, slow.model))
        fast.optimizer.step()
        slow.optimizer.step()
    losses, seconds, eager_losses, eager_seconds = zip(*runs, strict=True)
    largest, sizes = zip(*differences, strict=True)
    return Trial(losses, seconds, eager_losses, eager_seconds, max(largest), max(sizes), random)


def eager_step(model: torch.nn.Module, args: Sequence[torch.Tensor], parts: int) -> torch.Tensor:
    """Return the loss of a loop over micro-batches, each weighted by its number of samples: the reference for a pipeline."""
    batch, total = len(args[0]), torch.zeros((), device=args[0].device)
    pieces = (torch.tensor_split(arg, min(parts, batch)) for arg in args)
    for chunk in zip(*pieces, strict=True):
        loss = synthetic_loss(model(*chunk)) * (len(chunk[0]) / batch)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total


def synthetic_loss(output: Any) -> torch.Tensor:
    """Return the sum over floating tensors of the output of their mean square: a mean over samples, as micro-batches need."""
    squares = [leaf.float().square().mean() for leaf in _leaves(output) if leaf.is_floating_point()]
    if not squares:
        raise InputError(
            "the model's output holds no floating tensor, so there is nothing to train", hint="pipecompile plan MODEL"
        )
    return torch.stack(squares).sum()


def _leaves(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping | tuple | list):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from _leaves(part)


def _gradient_difference(ours: torch.nn.Module, theirs: torch.nn.Module) -> tuple[float, float]:
    """Return the largest difference of two gradients of one parameter, and the largest gradient. No gradient counts as 0."""
    difference = size = 0.0
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        here, there = (torch.zeros(()) if p.grad is None else p.grad.cpu() for p in (mine, other))
        difference = max(difference, float((here - there).abs().max()))
        size = max(size, float(there.abs().max()))
    return difference, size
