"""Cases of micro-batches in slices of their sequence, on ranks. Run on four ranks, as in cases.py."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import pipecompile as pc
from tests.distributed.cases import mesh_of
from tests.distributed.direct import on_emulated_streams
from tests.distributed.meshes import distance_of
from tests.support.decoders import Decoder, plain_step, token_loss, tokens_and_labels

STEPS = 4
EMPTY = 2
"""The step in which the first of several copies has no samples."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A schedule of slices on a mesh: of all ranks, so many per copy of the pipeline."""

    schedule: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    n_stages: int
    n_slices: int = 4
    checkpoint: str = "never"

    @property
    def copies(self) -> int:
        return dist.get_world_size() // self.shape[-1]

    def pipe(self, model: Decoder) -> pc.Pipeline:
        n_devices = self.shape[-1]
        schedule = pc.build_schedule(self.schedule, self.n_stages, 2, n_devices=n_devices, n_slices=self.n_slices)
        return pc.compile(
            model, self.n_stages, mesh=mesh_of(self.shape, *self.names), schedule=schedule, loss_fn=token_loss,
            checkpoint=self.checkpoint, cost="analytic", example_args=(tokens_and_labels()[0],),
        )  # fmt: skip


def trained(layout: Layout) -> dict[str, float]:
    """Return how far losses, gradients and weights are off those of whole sequences on all samples, in steps of unequal parts."""
    torch.manual_seed(3)
    model = Decoder(tied=True).double()
    eager, pipe = copy.deepcopy(model), layout.pipe(model)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (pipe, eager)]
    loss = worst = 0.0
    for step in range(STEPS):
        parts = [_part(step, index, layout.copies) for index in range(layout.copies)]
        own = _step(pipe, parts[dist.get_rank() // layout.shape[-1]], is_first=not step)
        loss = max(loss, abs(own - _eager_step(eager, parts)))
        expected = dict(eager.named_parameters())
        off = [distance_of(one.grad, expected[name].grad) for name, one in pipe.named_parameters()]
        worst = max(worst, *off)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {"loss": loss, "worst": worst}


def _part(step: int, index: int, copies: int) -> tuple[Tensor, Tensor]:
    """Return the part of a batch of a copy of the pipeline. After the first step, parts are unequal."""
    tokens, labels = tokens_and_labels(4 + index * min(step, 1), ignored=True)
    is_empty = step == EMPTY and copies > 1 and index == 0
    return (tokens[:0], labels[:0]) if is_empty else (tokens, labels)


def _step(pipe: pc.Pipeline, part: Sequence[Tensor], *, is_first: bool) -> float:
    """Step. A rank passes zeros for what it does not use."""
    tokens, labels = part
    if not is_first:
        tokens = tokens if pipe.needs_inputs else torch.zeros_like(tokens)
        labels = labels if pipe.needs_targets else torch.zeros_like(labels)
    return pipe.step(tokens, target=labels).item()


def _eager_step(model: Decoder, parts: Sequence[Sequence[Tensor]]) -> float:
    tokens, labels = (torch.cat(each) for each in zip(*parts, strict=True))
    return plain_step(model, tokens, labels, 1)


def of_two_lengths() -> dict[str, float]:
    """Return how far gradients are off where the sequences of two copies have different lengths."""
    torch.manual_seed(4)
    layout = Layout("seq1f1b", ("dp", "pp"), (2, 2), 2)
    model = Decoder().double()
    eager, pipe = copy.deepcopy(model), layout.pipe(model)
    parts = [tokens_and_labels(4, length, ignored=True) for length in (16, 8)]
    total = sum(int((labels != -100).sum()) for _, labels in parts)
    expected = 0.0
    for tokens, labels in parts:
        share = token_loss(eager(tokens), labels) * (int((labels != -100).sum()) / total)
        share.backward()
        expected += share.item()
    loss = abs(_step(pipe, parts[dist.get_rank() // 2], is_first=True) - expected)
    gradients = dict(eager.named_parameters())
    return {
        "loss": loss,
        "worst": max(distance_of(one.grad, gradients[name].grad) for name, one in pipe.named_parameters()),
    }


LAYOUTS = {
    "slices on four": Layout("seq1f1b", ("pp",), (4,), 4),
    "slices, copies": Layout("seq1f1b", ("dp", "pp"), (2, 2), 2, checkpoint="always"),
    "slices, interleaved": Layout("seq1f1b-interleaved", ("dp", "pp"), (2, 2), 4, checkpoint="except_last"),
    "slices, shards": Layout("terapipe", ("dp_shard", "pp"), (2, 2), 2, n_slices=2),
}

CASES: dict[str, Callable[[], Any]] = {
    **{name: (lambda layout=layout: trained(layout)) for name, layout in LAYOUTS.items()},
    "slices, two lengths": of_two_lengths,
    "slices, emulated": on_emulated_streams(lambda: trained(LAYOUTS["slices on four"])),
}
"""Cases by name, in the order in which ranks run them."""
