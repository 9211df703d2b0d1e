"""Losses over tokens on ranks: two copies of a pipeline of two stages, with tied weights and BatchNorm, on lists of micro-batches of
several lengths and on mini-batches whose labels count differently.
"""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from tests.distributed.case_models import FULL
from tests.distributed.cases import pair_mesh
from tests.distributed.meshes import distance_of

SHAPES = ((3, 4), (2, 7), (2, 4), (3, 7), (1, 7), (4, 4)) if FULL else ((3, 4), (2, 7), (1, 7), (4, 4))
"""Micro-batches of both copies, half of them each: their samples and lengths."""

OPTIONS: dict[str, Any] = {"batch_norm": "deferred", "cost": "analytic", "n_microbatches": 2}


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.mix = nn.Embedding(9, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.table(ids).mT).mT
        h = h + self.mix(h.cumsum(1)).tanh()
        return F.linear(h, self.table.weight)


def tokens(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y.flatten(0, 1), labels.flatten())


def listed() -> Any:
    """Compare two steps, and a call, to those of one process on the micro-batches of both copies; return the largest difference."""
    torch.manual_seed(8)
    model = Words().double()
    reference = copy.deepcopy(model)
    ids = [torch.randint(9, shape) for shape in SHAPES]
    labels = [one.masked_fill(torch.rand(one.shape) < 0.4, -100) for one in ids]
    mesh, half, pairs = pair_mesh(), len(SHAPES) // 2, [*zip(ids, labels, strict=True)]
    pipe = pc.compile(model, 2, mesh=mesh, loss_fn=tokens, **OPTIONS)
    part, given = slice(0, half) if mesh.get_local_rank("dp") == 0 else slice(half, None), [None]
    if dist.get_rank() == 0:
        given = [stepped(pc.compile(reference, 2, devices=["cpu"] * 2, loss_fn=tokens, **OPTIONS), pairs, ids)]
    found = stepped(pipe, pairs[part], ids[part])
    dist.broadcast_object_list(given)
    expected: Any = given[0]
    differences = [one - other for one, other in zip(found["losses"], expected["losses"], strict=True)]
    differences += [distance_of(value, expected["tensors"][name]) for name, value in found["tensors"].items()]
    differences += map(distance_of, found["outputs"], expected["outputs"][part])
    return max(map(abs, differences))


def stepped(pipe: Any, pairs: Any, ids: Any) -> dict[str, Any]:
    """Return the losses of two steps, the gradients and buffers after them, and the outputs of a call."""
    losses = [float(pipe.step(microbatches=pairs)) for _ in range(2)]
    tensors = {name: value.clone().double() for name, value in pipe.named_buffers()}
    tensors |= {name: value.grad for name, value in pipe.named_parameters()}
    with torch.no_grad():
        return {"losses": losses, "tensors": tensors, "outputs": pipe.eval()(microbatches=ids)}


def floored(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return a mean over labels that divides by no less than one."""
    losses = F.cross_entropy(y.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.sum() / (labels != -100).sum().clamp(min=1)


def counted() -> Any:
    """Compare steps of two copies on the halves of mini-batches to eager's on the whole; return the largest difference.

    Labels of the first copy all count, some, or none; it has one micro-batch or two.
    """
    torch.manual_seed(9)
    mesh = pair_mesh()
    part, differences = slice(0, 4) if mesh.get_local_rank("dp") == 0 else slice(4, 8), []
    for loss_fn, count in product((tokens, floored), (1, 2)) if FULL else ((tokens, 2), (floored, 1)):
        model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 9)).double()
        eager = copy.deepcopy(model)
        pipe = pc.compile(model, 2, mesh=mesh, loss_fn=loss_fn, cost="analytic", n_microbatches=count)
        for ignored in (0.0, 0.6, 1.0):
            ids, labels = torch.randint(9, (8, 5)), torch.randint(9, (8, 5))
            labels[:4] = labels[:4].masked_fill(torch.rand(4, 5) < ignored, -100)
            loss = loss_fn(eager(ids), labels)
            loss.backward()
            differences.append(float(pipe.step(ids[part], target=labels[part]) - loss.detach()))
        parameters = dict(eager.named_parameters())
        differences += [distance_of(value.grad, parameters[name].grad) for name, value in pipe.named_parameters()]
    return max(map(abs, differences))


def detached() -> Any:
    """Train with a loss without a gradient; return the errors of this rank, and the loss without gradients."""
    pipe = pc.compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2, mesh=pair_mesh(), cost="analytic",
                      loss_fn=lambda y: y.detach().square().mean(), n_microbatches=2)  # fmt: skip
    with torch.no_grad():
        pipe.step(torch.ones(4, 4))
    try:
        pipe.step(torch.ones(4, 4))
    except pc.PipecompileError as error:
        return [type(error).__name__, str(error)]
    return []


CASES = {"listed": listed, "counted": counted, "detached": detached}
