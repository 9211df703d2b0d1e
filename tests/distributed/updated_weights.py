"""Scripts of ranks that update their weights differently: what each rank is warned of, per script, as JSON."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed import init_device_mesh

import pipecompile as pc
from tests.distributed.mistakes import batches, compiled, error_of, square

Between = Callable[[Any, torch.optim.Optimizer, bool, int], object]
"""What a script does after a step: with the pipeline, the optimizer, whether it is the rank (or copy) that is different, the step."""


def adamw(pipe: Any, _: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(pipe.parameters(), lr=1e-2)


def trained(
    is_other: bool, between: Between, make: Callable[[Any, bool], torch.optim.Optimizer] = adamw, **options: Any
) -> list[str]:
    """Train for three steps; return what was warned of."""
    pipe, (x, y) = compiled(example_args=(torch.zeros(8, 4),), **options), batches(3)
    optimizer = make(pipe, is_other)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            pipe.step(x[step], target=y[step])
            between(pipe, optimizer, is_other, step)
            optimizer.zero_grad()
    return [str(each.message) for each in caught]


def stepped(_: Any, optimizer: torch.optim.Optimizer, *__: Any) -> None:
    optimizer.step()


def skipped(_: Any, optimizer: torch.optim.Optimizer, is_other: bool, step: int) -> None:
    if not is_other or step:
        optimizer.step()


def twice(_: Any, optimizer: torch.optim.Optimizer, is_other: bool, __: int) -> None:
    for _ in range(1 + is_other):
        optimizer.step()


def plateau(_: Any, optimizer: torch.optim.Optimizer, is_other: bool, __: int) -> None:
    optimizer.step()
    if is_other:
        optimizer.param_groups[0]["lr"] *= 0.5


def kept(_: Any, optimizer: Any, is_other: bool, __: int) -> None:
    optimizer.step()
    if is_other:
        optimizer.zero_grad = lambda: None


def clipped(pipe: Any, optimizer: torch.optim.Optimizer, *_: Any) -> None:
    nn.utils.clip_grad_norm_(list(pipe.parameters()), 0.1)
    optimizer.step()


def clipped_together(pipe: Any, optimizer: torch.optim.Optimizer, *_: Any) -> None:
    pipe.clip_grad_norm_(0.1)
    optimizer.step()


def by_hand(pipe: Any, *_: Any) -> None:
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.sub_(0.1 * parameter.grad)


def by_layer(pipe: Any, is_other: bool) -> torch.optim.Optimizer:
    """Return an optimizer with a learning rate per parameter, of which each rank has others, and a schedule that begins with 0."""
    groups = [{"params": [one], "lr": 0.1 / (2 + place + is_other)} for place, one in enumerate(pipe.parameters())]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 2)
    return optimizer


def searched(pipe: Any, _: bool) -> torch.optim.Optimizer:
    return torch.optim.LBFGS([*pipe.parameters()])


class Tied(nn.Module):
    """A weight of both ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(torch.tanh(self.first(x)))


def hooked() -> list[Any]:
    """Step with a hook that halves the gradient of a weight of both ranks; return how far it is off, and what was warned of."""
    (x, y), models = batches(1), []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Tied())
        models[-1].first.weight.register_hook(lambda gradient: gradient / 2)
    model, eager = models
    pipe = pc.compile(model, 2, loss_fn=square, n_microbatches=2, cost="analytic", pin={"first": 0, "last": 1})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe.step(x[0], target=y[0])
    for part, target in zip(x[0].split(4), y[0].split(4), strict=True):
        (square(eager(part), target) / 2).backward()
    gradient, expected = model.first.weight.grad, eager.first.weight.grad
    off = 0.0 if gradient is None or expected is None else (gradient - expected).abs().max().item()
    return [off, *(str(each.message) for each in caught)]


def of_ranks(rank: int) -> Any:
    """Train on two ranks, of which the second is different."""

    def other_rate(pipe: Any, is_other: bool) -> torch.optim.Optimizer:
        return torch.optim.AdamW(pipe.parameters(), lr=1e-2 * (1 + is_other))

    scripts: dict[str, Callable[[], Any]] = {
        "skipped": lambda: trained(rank == 1, skipped),
        "twice": lambda: trained(rank == 1, twice),
        "plateau": lambda: trained(rank == 1, plateau),
        "rate": lambda: trained(rank == 1, stepped, other_rate),
        "kept": lambda: trained(rank == 1, kept),
        "clipped": lambda: trained(rank == 1, clipped),
        "alike": lambda: trained(rank == 1, stepped),
        "clipped together": lambda: trained(rank == 1, clipped_together),
        "by hand": lambda: trained(rank == 1, by_hand),
        "by layer": lambda: trained(rank == 1, stepped, by_layer),
        "hooked": hooked,
        "searched": lambda: error_of(lambda: trained(rank == 1, lambda _, one, *__: one.step(lambda: 0.0), searched)),
    }  # fmt: skip
    return json.dumps({name: script() for name, script in scripts.items()})


def loaded(pipe: Any, optimizer: torch.optim.Optimizer, is_other: bool, step: int) -> None:
    optimizer.step()
    if not step:
        state = pipe.full_state_dict()
        state["2.bias"] += is_other
        pipe.load_state_dict(state)


def of_copies(rank: int) -> Any:
    """Train two copies, of which the second is different, with whole parameters and with sharded ones."""
    said = {}
    for kind in ("dp", "dp_shard"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(kind, "pp"))
        for script in (skipped, loaded, clipped_together):
            said[f"{kind} {script.__name__}"] = trained(rank > 1, script, mesh=mesh)
    return json.dumps(said)
