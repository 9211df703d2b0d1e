"""Cases of schedules with several copies of each stage, on ranks. Run on four ranks, as in cases.py."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipecompile as pc
from tests.distributed.cases import mesh_of
from tests.distributed.direct import between_devices, on_emulated_streams
from tests.distributed.meshes import distance_of
from tests.support.decoders import Decoder, plain_step, token_loss, tokens_and_labels

STEPS = 3
N_MICROBATCHES = (4, 4, 1)
"""Of the steps: one micro-batch has one direction."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A schedule on a mesh of all ranks."""

    schedule: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def pipe(self, model: nn.Module, **options: Any) -> pc.Pipeline:
        options = {"loss_fn": token_loss, "n_microbatches": 4, "cost": "analytic"} | self.options | options
        example = (tokens_and_labels()[0],)
        mesh = mesh_of(self.shape, *self.names)
        return pc.compile(model, self.shape[-1], mesh=mesh, schedule=self.schedule, example_args=example, **options)


def trained(layout: Layout) -> dict[str, float]:
    """Return how far losses, gradients, weights and outputs are off eager's. A rank passes zeros for what it does not need."""
    torch.manual_seed(3)
    model = Decoder(tied=True).double()
    eager, pipe = copy.deepcopy(model), layout.pipe(model)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1, momentum=0.9) for one in (pipe, eager)]
    n_copies, index = dist.get_world_size() // layout.shape[-1], dist.get_rank() // layout.shape[-1]
    loss = worst = output = 0.0
    for step in range(STEPS):
        pipe.reschedule(n_microbatches=N_MICROBATCHES[step])
        parts = [tokens_and_labels(4 + one * step, ignored=True) for one in range(n_copies)]
        loss = max(loss, abs(_step(pipe, *parts[index]) - plain_step(eager, *_joined(parts), 1)))
        expected = dict(eager.named_parameters())
        worst = max([worst, *(distance_of(one.grad, expected[name].grad) for name, one in pipe.named_parameters())])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            output = max(output, float((pipe(parts[index][0]) - eager(parts[index][0])).abs().max()))
    return {"loss": loss, "worst": worst, "output": output}


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    tokens, labels = (torch.cat(each) for each in zip(*parts, strict=True))
    return tokens, labels


def _step(pipe: pc.Pipeline, tokens: Tensor, labels: Tensor) -> float:
    tokens = tokens if pipe.needs_inputs else torch.zeros_like(tokens)
    return pipe.step(tokens, target=labels if pipe.needs_targets else torch.zeros_like(labels)).item()


class Scaled(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return token_loss(output * self.scale, target)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(20, 16), nn.BatchNorm1d(16), nn.Linear(16, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(tokens).flatten(0, 1)).view(*tokens.shape, -1))


class Counting(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.n_calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.n_calls += 1
        return super().forward(tokens)


def refused() -> dict[str, str]:
    """Return the errors of what copies on several ranks cannot share."""
    layout = Layout("chimera", ("dp", "pp"), (2, 2))
    attempts: dict[str, Callable[[], Any]] = {
        "norm": lambda: layout.pipe(Normed().double(), batch_norm="each"),
        "deferred": lambda: layout.pipe(Normed().double(), batch_norm="deferred"),
        "counter": lambda: layout.pipe(Counting().double()),
        "loss": lambda: layout.pipe(Decoder().double(), loss_fn=Scaled()),
        "later": lambda: Layout("1f1b", ("dp", "pp"), (2, 2)).pipe(Decoder().double()).reschedule("chimera"),
    }
    return {name: _error_of(attempt) for name, attempt in attempts.items()}


def _error_of(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except pc.PipecompileError as error:
        return str(error)
    return ""


def hooked() -> list[str]:
    """Return the warnings of a step with a hook on a gradient, and whether the gradient is eager's."""
    torch.manual_seed(5)
    model = Decoder().double()
    eager = copy.deepcopy(model)
    for one in (model, eager):
        one.blocks[1].out.weight.register_hook(lambda gradient: gradient * 2.0)
    pipe = Layout("chimera", ("pp",), (4,)).pipe(model)
    tokens, labels = tokens_and_labels(4, ignored=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", pc.RecordingWarning)
        _step(pipe, tokens, labels)
    plain_step(eager, tokens, labels, 1)
    expected = dict(eager.named_parameters())
    off = [distance_of(one.grad, expected[name].grad) for name, one in pipe.named_parameters()]
    return [" ".join(str(one.message) for one in caught), f"right: {max(off, default=0.0) < 1e-13}"]


LAYOUTS = {
    "copied stages on four": Layout("chimera", ("pp",), (4,)),
    "copied stages, dualpipe": Layout("dualpipe", ("pp",), (4,), {"checkpoint": "always"}),
    "copied stages, copies": Layout("chimera", ("dp", "pp"), (2, 2), {"checkpoint": "except_last"}),
    "copied stages, shards": Layout("chimera", ("dp_shard", "pp"), (2, 2)),
}

CASES: dict[str, Callable[[], Any]] = {
    **{name: (lambda layout=layout: trained(layout)) for name, layout in LAYOUTS.items()},
    "copied stages, direct": between_devices(lambda: trained(LAYOUTS["copied stages, copies"])),
    "copied stages, emulated": on_emulated_streams(lambda: trained(LAYOUTS["copied stages on four"])),
    "copied stages, refused": refused,
    "copied stages, hooked": hooked,
}
"""Cases by name, in the order in which ranks run them."""
