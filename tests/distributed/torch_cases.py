"""Cases beside `torch.distributed.pipelining`: its schedules on our stages, its CSV files on our ranks, and its limits."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh

import pipecompile as pc

COUNT, SAMPLES = 4, 8

SUMS = [
    ["layers.0", "t_1", "add"],
    ["layers.1", "t_3", "add_1"],
    ["layers.2", "t_5", "add_2"],
    ["layers.3", "t_7", "add_3"],
]
"""Nodes of Rows that share a stage: no value then passes a stage by."""


class Rows(nn.Module):
    """A model whose stages use the number of samples or an input of the model, and exchange two values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        y = x
        for layer in self.layers:
            x, y = layer(x).reshape(x.shape[0], 6).relu() * scale, x.t().t() + y
        return x + y


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x.tanh())
        return x + first


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.tanh())
        return x


def square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def furthest(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    return max(float((value - right[name]).abs().max()) for name, value in left.items())


def eager(model: nn.Module, target: torch.Tensor, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    whole = copy.deepcopy(model)
    square(whole(**inputs), target).backward()
    return gradients(whole)


def split(
    mesh: DeviceMesh, model: nn.Module, n_stages: int, example: dict[str, torch.Tensor], **more: Any
) -> pc.Pipeline:
    options: dict[str, Any] = {
        "n_microbatches": COUNT,
        "loss_fn": square,
        "cost": "analytic",
        "example_kwargs": example,
    }
    cuts = [f"layers.{4 * stage // n_stages}" for stage in range(1, n_stages)]
    return pc.compile(model, n_stages, mesh=mesh, split_before=cuts, **options | more)


def stages_under_torch(mesh: DeviceMesh) -> dict[str, Any]:
    """Run our stages under its schedules, then its dumped orders on our ranks; return the distances of gradients to eager."""
    torch.manual_seed(2)
    rank, distances = dist.get_rank(mesh.get_group()), {}
    model, target = Rows(), torch.randn(SAMPLES, 6)
    inputs = {"x": torch.randn(SAMPLES, 6), "scale": torch.randn(SAMPLES, 6)}
    expected = eager(model, target, **inputs)
    makers: dict[str, tuple[int, Callable[..., Any]]] = {
        "1f1b": (2, lambda stages: pipelining.Schedule1F1B(stages[0], COUNT, square)),
        "interleaved": (4, lambda stages: pipelining.ScheduleInterleaved1F1B(stages, COUNT, square)),
        "interleaved-zb": (4, lambda stages: pipelining.ScheduleInterleavedZeroBubble(stages, COUNT, square)),
    }
    for name, (n_stages, make) in makers.items():
        pipe = split(mesh, model, n_stages, inputs, schedule=name if n_stages == 4 else "1f1b", keep_together=SUMS)
        pipe.zero_grad()
        schedule = make(pipe.torch_stages())
        schedule.step(**inputs, **({"target": target} if rank == 1 else {}))
        distances[name] = furthest(gradients(pipe), expected)
        if n_stages == 4:
            pipe.zero_grad()
            file = Path(os.environ["CASES_OUT"]) / f"{name}.{dist.get_rank()}.csv"
            schedule._dump_csv(file, format="compute_comms")
            pipe.reschedule(file).step(**inputs, target=target)
            distances[f"{name}.csv"] = furthest(gradients(pipe), expected)
            distances["order"] = str(pipe.schedule.rows[rank][:3])
    return distances


def refused(mesh: DeviceMesh) -> list[str]:
    """Return the errors of values that skip stages, of weights on two ranks, and of deferred BatchNorm."""
    errors = []
    x = torch.randn(SAMPLES, 6)
    for model, options in ((Skip(), {}), (Tied(), {"tied": "apart"}), (Rows(), {"batch_norm": "deferred"})):
        inputs = {"x": x} | ({"scale": x} if isinstance(model, Rows) else {})
        pipe = split(mesh, model, 4, inputs, schedule="interleaved", **options)
        try:
            pipe.torch_stages()
        except pc.PlanError as error:
            errors.append(str(error))
    return errors


def torch_alone(mesh: DeviceMesh) -> dict[str, Any]:
    """Run a skip, a tied weight and an uneven batch under `torch.distributed.pipelining` alone, and here.

    Between ranks gloo ends the process when a micro-batch is larger than the first, so the uneven batch stays on one rank there.
    """
    torch.manual_seed(4)
    return {
        "skip": _both(mesh, Skip(), SAMPLES, _by_torch, looped=True),
        "tied": _both(mesh, Tied(), SAMPLES, _by_torch, looped=False),
        "uneven": _both(mesh, Skip(), SAMPLES + 1, _alone_by_torch, looped=False),
    }


def _both(
    mesh: DeviceMesh, model: nn.Module, samples: int, by_torch: Callable[..., dict[str, torch.Tensor]], *, looped: bool
) -> dict[str, Any]:
    """Return its error, or the distance of its gradients to eager; and the distance of ours."""
    x, target = torch.randn(samples, 6), torch.randn(samples, 6)
    expected = eager(model, target, x=x)
    result: dict[str, Any] = {}
    try:
        result["torch"] = furthest(by_torch(mesh, copy.deepcopy(model), x, target, looped=looped), expected)
    except Exception as error:
        result["torch"] = f"{type(error).__name__}: {error}"
    options = {"schedule": "interleaved" if looped else "1f1b", "tied": "apart"}
    pipe = split(mesh, model, 4 if looped else 2, {"x": x}, **options)
    pipe.step(x, target=target)
    result["ours"] = furthest(gradients(pipe), expected)
    return result


def _by_torch(
    mesh: DeviceMesh, model: nn.Module, x: torch.Tensor, target: torch.Tensor, *, looped: bool
) -> dict[str, torch.Tensor]:
    group, n_stages = mesh.get_group(), 4 if looped else 2
    rank = dist.get_rank(group)
    cuts = {f"layers.{4 * stage // n_stages}": pipelining.SplitPoint.BEGINNING for stage in range(1, n_stages)}
    pipe = pipelining.pipeline(model, (x[: SAMPLES // COUNT],), split_spec=cuts)
    stages = [pipe.build_stage(index, torch.device("cpu"), group) for index in range(rank, n_stages, 2)]
    schedule = (
        pipelining.ScheduleInterleaved1F1B(stages, COUNT, square)
        if looped
        else pipelining.Schedule1F1B(stages[0], COUNT, square)
    )
    schedule.step(*((x,) if rank == 0 else ()), **({"target": target} if rank == 1 else {}))
    return {name: value for stage in stages for name, value in gradients(stage.submod).items()}


def _alone_by_torch(
    mesh: DeviceMesh, model: nn.Module, x: torch.Tensor, target: torch.Tensor, *, looped: bool
) -> dict[str, torch.Tensor]:
    """Run the whole model as one stage on this rank."""
    assert not looped
    alone = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    stage = pipelining.PipelineStage(model, 0, 1, torch.device("cpu"), group=alone)
    pipelining.ScheduleGPipe(stage, COUNT, square).step(x, target=target)
    return gradients(model)
