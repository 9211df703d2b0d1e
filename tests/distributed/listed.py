"""Lists of micro-batches of several lengths on ranks: two copies of a pipeline of two stages, with tied weights and BatchNorm."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from tests.distributed.cases import pair_mesh
from tests.distributed.meshes import distance_of

SHAPES = ((3, 4), (2, 7), (2, 4), (3, 7), (1, 7), (4, 4))


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
    options: dict[str, Any] = {"loss_fn": tokens, "batch_norm": "deferred", "cost": "analytic", "n_microbatches": 2}
    mesh = pair_mesh()
    pipe = pc.compile(model, 2, mesh=mesh, **options)
    whole = pc.compile(reference, 2, devices=["cpu"] * 2, **options)
    part, differences = slice(0, 3) if mesh.get_local_rank("dp") == 0 else slice(3, 6), []
    pairs = [*zip(ids, labels, strict=True)]
    for _ in range(2):
        differences.append(float(pipe.step(microbatches=pairs[part]) - whole.step(microbatches=pairs)))
    buffers, parameters = dict(reference.named_buffers()), dict(reference.named_parameters())
    differences += [distance_of(value.double(), buffers[name].double()) for name, value in pipe.named_buffers()]
    differences += [distance_of(value.grad, parameters[name].grad) for name, value in pipe.named_parameters()]
    with torch.no_grad():
        outputs = zip(pipe.eval()(microbatches=ids[part]), whole.eval()(microbatches=ids[part]), strict=True)
        differences += [distance_of(one, other) for one, other in outputs]
    return max(map(abs, differences))


CASES = {"listed": listed}
