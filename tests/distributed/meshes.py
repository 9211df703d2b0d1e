"""Cases of meshes of several dimensions: training equals eager on the whole batch. Run on four ranks, as in cases.py."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import pipecompile as pc
from pipecompile.distributed.data_parallel.sharded_parameters import ShardedParameters
from pipecompile.ir import Kind
from tests.distributed.case_models import FULL, LANGUAGE, distance, mean_square
from tests.distributed.cases import mesh_of, pair_mesh

STEPS, SAMPLES = 3, 13
PARTS = {1: (0, 13), 2: (0, 8, 13), 4: (0, 4, 7, 10, 13)}
"""Bounds of the parts of the batch, in samples, by the number of parts."""

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Block(nn.Module):
    """Two layers, a scale, and a skip over them. The frozen parameter has five rows, which two ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(6, 10), nn.Linear(10, 6), nn.Parameter(torch.tensor(0.7))
        self.frozen = nn.Parameter(torch.randn(5, 6), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x))) + self.frozen.mean(0)


def blocks() -> nn.Module:
    return nn.Sequential(*[Block() for _ in range(4)], nn.Linear(6, 3)).double()


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def trained(
    mesh: DeviceMesh,
    make_optimizer: MakeOptimizer = adam,
    prepare: Callable[[nn.Module], None] = lambda _: None,
    *,
    has_modes: bool = FULL,
    is_held: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train with clipping, two backwards per step, and compare to eager on the whole batch.

    With `has_modes`, also compare steps without gradients; with `is_held`, the first of two backwards is under `no_sync`. Return the largest difference of losses, norms, gradients and weights, the
    number of buckets, and the number of parameters.
    """
    torch.manual_seed(3)
    model, x, y = blocks(), torch.randn(SAMPLES, 6).double(), torch.randn(SAMPLES, 3).double()
    eager, part = copy.deepcopy(model), part_of(mesh)
    prepare(model)
    options = {"loss_fn": distance, "n_microbatches": 3, "cost": "analytic", "n_stages": mesh["pp"].size()} | options
    pipe = pc.compile(model, mesh=mesh, example_args=(x[part],), **options)
    mine, theirs, off = make_optimizer(pipe.parameters()), adam(eager.parameters()), []
    for step, norm_type in zip(range(STEPS), (2.0, math.inf, 1.0), strict=True):
        for again in range(2):
            with pipe.no_sync() if is_held and not again else nullcontext():
                loss = pipe.step(x[part] + again, target=y[part])
            whole = distance(eager(x + again), y)
            whole.backward()
            off.append(float(loss - whole))
        norm = pipe.clip_grad_norm_(0.1, norm_type)
        off.append(float(norm - torch.nn.utils.clip_grad_norm_(eager.parameters(), 0.1, norm_type)))
        expected = dict(eager.named_parameters())
        for name, parameter in pipe.named_parameters():
            if step == STEPS - 1 and expected[name].grad is not None:
                off.append(distance_of(parameter.grad, expected[name].grad))
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    off += [distance_of(parameter, expected[name]) for name, parameter in pipe.named_parameters()]
    with torch.no_grad():
        off.append(distance_of(pipe(x[part]), eager(x[part])))
    for mode in (torch.no_grad, torch.inference_mode) if has_modes else ():
        with mode():
            off.append(float(pipe.step(x[part], target=y[part]) - distance(eager(x), y)))
    assert all(parameter.grad is None for parameter in pipe.parameters())
    return {"worst": max(map(abs, off)), "reductions": pipe.replicas.reductions, "own": len([*pipe.parameters()])}


def by_stage(mesh: DeviceMesh, name: str, prepare: Callable[[nn.Module], None] = lambda _: None) -> dict[str, Any]:
    """Train under a schedule that gathers and frees the parameters of each stage between its blocks. Note how often a row does."""
    counted: list[str] = []
    schedule = pc.insert_sharding(pc.build_schedule(name, 4, 3, n_devices=mesh["pp"].size()), ahead=0)
    with patch.object(ShardedParameters, "release", _counting(ShardedParameters.release, counted)):
        result = trained(mesh, prepare=prepare, n_stages=4, schedule=schedule)
    expected = sum(action.kind is Kind.RESHARD for action in schedule.rows[mesh.get_local_rank("pp")])
    return result | {"releases": len(counted), "expected": 2 * STEPS * expected}


def _counting(release: Callable[..., None], counted: list[str]) -> Callable[..., None]:
    def counting(self: ShardedParameters, parameters: Any) -> None:
        release(self, parameters)
        counted.append("released")

    return counting


def tied(schedule: Any = "zb-h1", checkpoint: str = "always") -> Any:
    """Train a language model with sharded parameters, embeddings tied over both ranks, a split backward and recomputation."""
    torch.manual_seed(5)
    model, inputs = LANGUAGE()
    eager, mesh = copy.deepcopy(model), mesh_of((2, 2), "dp_shard", "pp")
    part = {"input_ids": inputs["input_ids"][part_of(mesh)]}
    options: dict[str, Any] = {"loss_fn": mean_square, "schedule": schedule, "checkpoint": checkpoint, "tied": "apart"}
    pipe = pc.compile(model, 2, mesh=mesh, example_kwargs=part, n_microbatches=2, cost="analytic", **options)
    mine, theirs, off = adam(pipe.parameters()), adam(eager.parameters()), []
    for _ in range(STEPS):
        whole = mean_square(eager(**inputs))
        whole.backward()
        off.append(float(pipe.step(**part) - whole))
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    expected = dict(eager.named_parameters())
    off += [distance_of(parameter, expected[name]) for name, parameter in pipe.named_parameters()]
    return {"worst": max(map(abs, off)), "copies": len(pipe._cache.latest.mirrors.copies)}


def part_of(mesh: DeviceMesh) -> slice:
    names = [name for name in ("dp", "dp_shard") if name in (mesh.mesh_dim_names or ())]
    size, index = 1, 0
    for name in names:
        size, index = size * mesh[name].size(), index * mesh[name].size() + mesh.get_local_rank(name)
    return slice(*PARTS[size][index : index + 2])


def distance_of(left: torch.Tensor | None, right: torch.Tensor | None) -> float:
    assert left is not None
    assert right is not None
    whole = left.full_tensor() if isinstance(left, DTensor) else left
    return float((whole - right).abs().max())


def zero() -> Any:
    group = pair_mesh().get_group("dp")
    return trained(
        pair_mesh(),
        lambda parameters: ZeroRedundancyOptimizer([*parameters], torch.optim.AdamW, process_group=group, lr=1e-2),
    )


def tensor_parallel(mesh: DeviceMesh) -> Any:
    return trained(mesh, prepare=lambda model: in_parts(model, mesh), cost="auto" if FULL else "analytic")


def in_parts(model: nn.Module, mesh: DeviceMesh) -> None:
    for block in model[:4]:  # type: ignore[index]
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def kept_as_fully_shard_does() -> Any:
    """Compare shards to those of `fully_shard`, bit for bit; then load a whole state, and one of shards."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    mesh, eager, x = mesh_of((2, 2), "dp_shard", "pp"), copy.deepcopy(model), torch.randn(8, 6)
    twin = fully_shard(copy.deepcopy(model), mesh=mesh["dp_shard"]).state_dict()
    pipe = pc.compile(model, 2, mesh=mesh, example_args=(x,), loss_fn=lambda y: y.mean(), cost="analytic")
    state = pipe.state_dict()
    same = [
        torch.equal(kept.to_local(), twin[key].to_local()) and kept.placements == twin[key].placements
        for key, kept in state.items()
    ]
    hollow = [parameter.untyped_storage().nbytes() for parameter in model.parameters()]
    changed = {key: value + 1 for key, value in eager.state_dict().items()}
    pipe.load_state_dict(changed)
    full = pipe.full_state_dict()
    pipe.load_state_dict({key: value * 0 for key, value in state.items()})
    zeros = pipe.full_state_dict().values()
    return {"same": same, "keys": sorted(state), "hollow": hollow,
            "changed": all(torch.equal(full[key], changed[key]) for key in changed),
            "zero": all(not value.any() for value in zeros)}  # fmt: skip


def layers_loaded() -> Any:
    """Save and load the state of a model with tensor-parallel layers, whole and in parts."""
    torch.manual_seed(9)
    model, mesh, x = blocks(), mesh_of((2, 2), "pp", "tp"), torch.randn(8, 6).double()
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    in_parts(model, mesh)
    pipe = pc.compile(model, 2, mesh=mesh, example_args=(x,), loss_fn=lambda y: y.mean(), n_microbatches=2)
    was = pipe.full_state_dict()
    pipe.load_state_dict({key: value + 1 for key, value in expected.items()})
    now = pipe.full_state_dict()
    pipe.load_state_dict({key: value.detach() * 0 for key, value in pipe.state_dict().items()})
    zeros = pipe.full_state_dict().values()
    return {"same": [torch.equal(was[key], expected[key]) for key in expected],
            "changed": all(torch.equal(now[key], expected[key] + 1) for key in expected),
            "zero": all(not value.any() for value in zeros)}  # fmt: skip


def scaled(mesh: DeviceMesh) -> Any:
    """Run four steps with a GradScaler; in the second a gradient of the first stage is infinite, so every rank skips it."""
    torch.manual_seed(8)
    model, x, y = blocks(), torch.randn(SAMPLES, 6).double(), torch.randn(SAMPLES, 3).double()
    eager, part = copy.deepcopy(model), part_of(mesh)
    bad = [0.0]
    for each in (model, eager):
        each[0].up.weight.register_hook(lambda gradient: gradient + bad[0])  # type: ignore[index]
    pipe = pc.compile(model, mesh["pp"].size(), mesh=mesh, example_args=(x[part],), loss_fn=distance, cost="analytic")
    runs = [(m, adam(m.parameters()), torch.amp.GradScaler("cpu", 2.0**20, growth_interval=2)) for m in (pipe, eager)]
    scales = []
    for value, (run, optimizer, scaler) in product((0.0, math.inf, 0.0, 0.0), runs):
        bad[0] = value
        if isinstance(run, pc.Pipeline):
            run.step(x[part], target=y[part], scaler=scaler)
        else:
            scaler.scale(distance(run(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    expected = dict(eager.named_parameters())
    worst = max(distance_of(value, expected[name]) for name, value in pipe.named_parameters())
    return {"worst": worst, "mine": scales[::2], "eager": scales[1::2]}


def refused() -> list[str]:
    """Return the errors of meshes, models and calls that are not supported."""
    errors, model = [], nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shared = mesh_of((2, 2), "dp_shard", "pp")
    kept = pc.compile(copy.deepcopy(model), 2, mesh=shared, example_args=(torch.randn(4, 4),), cost="analytic")
    for call in (
        lambda: pc.compile(model, 2, mesh=mesh_of((2, 2), "copies", "pp")),
        lambda: pc.compile(
            nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4)), 2, mesh=pair_mesh(), example_args=(torch.randn(4, 4),)
        ),
        lambda: [*pc.compile(copy.deepcopy(model), 2, mesh=shared).parameters()],
        lambda: pc.compile(fully_shard(copy.deepcopy(model), mesh=shared["dp_shard"]), 2, mesh=shared),
        kept.half,
        lambda: copy.deepcopy(kept),
    ):
        try:
            call()
        except pc.InputError as error:
            errors.append(str(error))
    return errors


CASES: dict[str, Callable[[], Any]] = {
    "dp x pp": lambda: trained(pair_mesh(), has_modes=True),
    "zero x pp": zero,
    "dp_shard x pp": lambda: trained(mesh_of((2, 2), "dp_shard", "pp")),
    "hsdp": lambda: trained(mesh_of((2, 2, 1), "dp", "dp_shard", "pp"), has_modes=True),
    "hsdp x pp": lambda: trained(mesh_of((2, 1, 2), "dp", "dp_shard", "pp")),
    "dp_shard x pp, by stage": lambda: by_stage(mesh_of((2, 2), "dp_shard", "pp"), "zbv"),
    "hsdp, by stage": lambda: by_stage(mesh_of((2, 2, 1), "dp", "dp_shard", "pp"), "looped-bfs"),
    "pp x tp": lambda: tensor_parallel(mesh_of((2, 2), "pp", "tp")),
    "dp x tp": lambda: tensor_parallel(mesh_of((2, 1, 2), "dp", "pp", "tp")),
    "tied": tied,
    "tied, by stage": lambda: tied(pc.insert_sharding(pc.build_schedule("zb-h1", 2, 2), ahead=0)),
    "kept": kept_as_fully_shard_does,
    "layers loaded": layers_loaded,
    "scaler": lambda: scaled(mesh_of((4,), "pp")),
    "scaler of parts": lambda: scaled(mesh_of((2, 2), "dp_shard", "pp")),
    "refused meshes": refused,
}
"""Cases by name, in the order in which ranks run them."""
