"""Cases of BatchNorm with two copies of a pipeline: statistics are those of the whole batch. Run on four ranks, as in cases.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.nn.functional import all_reduce

import pipecompile as pc
from pipecompile.tracing.recompute_flag import is_recomputing
from tests.distributed.cases import pair_mesh
from tests.distributed.meshes import distance_of


def deferred() -> Any:
    """Compare running statistics and gradients to those of one process with twice as many micro-batches; return the largest difference."""
    torch.manual_seed(6)
    layers = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, momentum=None)]
    model, x = nn.Sequential(*layers).double(), torch.randn(12, 2, 7, 7).double()
    reference = copy.deepcopy(model)
    options: dict[str, Any] = {"loss_fn": lambda y: y.pow(3).mean(), "batch_norm": "deferred", "cost": "analytic"}
    mesh = pair_mesh()
    pipe = pc.compile(model, 2, mesh=mesh, n_microbatches=3, **options)
    whole = pc.compile(reference, 2, devices=["cpu"] * 2, n_microbatches=6, **options)
    part, differences = slice(0, 6) if mesh.get_local_rank("dp") == 0 else slice(6, 12), []
    for scale in (1, 3):
        differences.append(float(pipe.step(x[part] * scale) - whole.step(x * scale)))
    buffers, parameters = dict(reference.named_buffers()), dict(reference.named_parameters())
    differences += [distance_of(value.double(), buffers[name]) for name, value in pipe.named_buffers()]
    differences += [distance_of(value.grad, parameters[name].grad) for name, value in pipe.named_parameters()]
    return max(map(abs, differences))


class SyncNorm(nn.SyncBatchNorm):
    """The same computation as torch's own layer, which runs on GPUs only."""

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        shape = (1, -1, 1, 1)
        count = self.process_group.size() * samples.numel() / samples.shape[1]
        mean = self._sum(samples.sum((0, 2, 3))) / count
        centred = samples - mean.view(shape)
        variance = self._sum(centred.square().sum((0, 2, 3))) / count
        if not is_recomputing():
            self.running_mean.data.lerp_(mean.detach(), 0.1)
            self.running_var.data.lerp_(variance.detach() * count / (count - 1), 0.1)
        return centred * (self.weight / (variance + self.eps).sqrt()).view(shape) + self.bias.view(shape)

    def _sum(self, part: torch.Tensor) -> torch.Tensor:
        return all_reduce(part, group=self.process_group)


def synchronised(schedule: str, checkpoint: str) -> Any:
    """Compare a step with SyncNorm to eager BatchNorm, where each eager batch has the samples that the copies normalise together."""
    torch.manual_seed(7)
    eager = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.BatchNorm2d(2)
    ).double()
    model, mesh, x = copy.deepcopy(eager), pair_mesh(), torch.randn(12, 2, 7, 7).double()
    for index in (1, 4):
        norm = SyncNorm(model[index].num_features, process_group=mesh.get_group("dp")).double()
        norm.load_state_dict(model[index].state_dict())
        model[index] = norm
    parts = [x[3 * k : 3 * k + 3] for k in range(4)]
    own = parts[:2] if mesh.get_local_rank("dp") == 0 else parts[2:]
    options: dict[str, Any] = {"n_microbatches": 2, "schedule": schedule, "checkpoint": checkpoint}
    pipe = pc.compile(model, 2, mesh=mesh, loss_fn=lambda y: y.pow(3).mean(), cost="profile", **options)
    rest = float(pipe.step(torch.cat(own)))
    for first, second in zip(parts[:2], parts[2:], strict=True):  # one micro-batch of each copy
        whole = eager(torch.cat([first, second])).pow(3).mean() / 2
        whole.backward()
        rest -= float(whole)
    expected = dict(eager.named_parameters())
    differences = [rest] + [distance_of(value.grad, expected[name].grad) for name, value in pipe.named_parameters()]
    buffers = dict(eager.named_buffers())
    differences += [distance_of(value, buffers[name]) for name, value in pipe.named_buffers() if "running" in name]
    return max(map(abs, differences))


def copied() -> Any:
    """Return by how much the statistics of a copied pipeline differ from those of the pipeline, on each copy of the mesh, after a step of both."""
    torch.manual_seed(8)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.BatchNorm1d(2)), torch.randn(8, 3)
    mesh = pair_mesh()
    options: dict[str, Any] = {"loss_fn": lambda y: y.pow(3).mean(), "batch_norm": "each", "cost": "analytic"}
    pipe = pc.compile(model, 2, mesh=mesh, n_microbatches=2, **options)
    part = x[:4] if mesh.get_local_rank("dp") == 0 else x[4:]
    pipe.step(part)
    other = copy.deepcopy(pipe)
    for one in (pipe, other):
        one.step(part)
    buffers = dict(other.named_buffers())
    return max(distance_of(value.double(), buffers[name]) for name, value in pipe.named_buffers())


CASES: dict[str, Callable[[], Any]] = {
    "deferred": deferred,
    "statistics of a copy": copied,
    "synchronised": lambda: synchronised("1f1b", "never"),
    "synchronised, divided": lambda: synchronised("zb-h1", "always"),
}
"""Cases by name, in the order in which ranks run them."""
