"""Cases of layers in parts (tp) whose parameters are sharded further (dp_shard). Run on four ranks, as in cases.py."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import pipecompile as pc
from tests.distributed.cases import mesh_of, pair_mesh
from tests.distributed.meshes import blocks, by_stage, in_parts, trained


def mesh() -> DeviceMesh:
    return mesh_of((2, 1, 2), "dp_shard", "pp", "tp")


def made(own: DeviceMesh) -> tuple[nn.Module, nn.Module]:
    """Return a model with layers in parts, and the same without. `fully_shard` takes no scalars."""
    torch.manual_seed(4)
    model = blocks()
    for block in model[:4]:  # type: ignore[index]
        block.scale = nn.Parameter(torch.tensor([0.7]).double())
    whole = copy.deepcopy(model)
    in_parts(model, own)
    return model, whole


def compiled(model: nn.Module, own: DeviceMesh) -> pc.Pipeline:
    example = torch.zeros(8, 6).double()
    return pc.compile(model, 1, mesh=own, example_args=(example,), loss_fn=lambda y: y.square().mean(), cost="analytic")


def states() -> dict[str, bool]:
    """Compare the shards of parts to those of `fully_shard`, and load states: a whole one, one of `fully_shard`, and shards."""
    own = mesh()
    model, whole = made(own)
    theirs = fully_shard(copy.deepcopy(model), mesh=own["dp_shard"]).state_dict()
    pipe = compiled(model, own)
    shards = pipe.state_dict()
    parts = [key for key, one in theirs.items() if one.device_mesh.ndim == 2]
    same = {key: torch.equal(one.to_local(), theirs[key].to_local()) for key, one in shards.items()}
    pipe.load_state_dict({key: value + 1 for key, value in whole.state_dict().items()})
    full = pipe.full_state_dict()
    pipe.load_state_dict({key: value * 2 for key, value in theirs.items()})
    doubled = pipe.full_state_dict()
    pipe.load_state_dict({key: value * 0 for key, value in shards.items()})
    return {
        "parts": len(parts) == 16 and all(shards[key].placements == theirs[key].placements for key in parts),
        "shards": all(same.values()) and all(one.device_mesh.ndim == 2 for one in shards.values()),
        "whole": all(torch.equal(full[key], value + 1) for key, value in whole.state_dict().items()),
        "theirs": all(torch.equal(doubled[key], 2 * value) for key, value in whole.state_dict().items()),
        "own": not any(value.any() for value in pipe.full_state_dict().values()),
    }


def saved(directory: Path) -> float:
    """Train a step, save with the state of the optimizer, and load both on two stages in two copies. Return the largest difference of
    the weights after one more step.
    """
    own, x = mesh(), torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).double()
    first, other = compiled(made(own)[0], own), compiled_in_stages(x)
    optimizers = [torch.optim.AdamW(pipe.parameters(), 0.1) for pipe in (first, other)]
    first.step(x)
    optimizers[0].step()
    optimizers[0].zero_grad()
    state = {"model": first.state_dict(), "optimizer": first.optimizer_state_dict(optimizers[0])}
    pc.save_checkpoint(state, directory, 1).result()
    state = {"model": other.state_dict(), "optimizer": other.optimizer_state_dict(optimizers[1])}
    dcp.load(state, checkpoint_id=pc.latest_checkpoint(directory))
    other.load_state_dict(state["model"])
    other.load_optimizer_state_dict(optimizers[1], state["optimizer"])
    for pipe, optimizer in zip((first, other), optimizers, strict=True):
        pipe.step(x)
        optimizer.step()
    expected = first.full_state_dict()
    return max(float((value - expected[key]).abs().max()) for key, value in other.full_state_dict().items())


def compiled_in_stages(x: torch.Tensor) -> pc.Pipeline:
    _, whole = made(mesh())
    return pc.compile(
        whole, 2, mesh=pair_mesh(), example_args=(x,), loss_fn=lambda y: y.square().mean(), cost="analytic"
    )


def refused() -> str:
    """Return the error of layers in parts on another mesh."""
    try:
        return f"no error: {compiled(made(mesh_of((2, 2), 'tp', 'other'))[0], mesh())}"
    except pc.InputError as error:
        return str(error)


def is_sharded_twice() -> bool:
    """Whether a step leaves gradients that are sharded as their parameters are."""
    own = mesh()
    pipe = compiled(made(own)[0], own)
    pipe.step(torch.ones(8, 6).double())
    gradients = [(one.grad, one) for one in pipe.parameters() if one.requires_grad]
    return all(isinstance(grad, DTensor) and grad.placements == one.placements for grad, one in gradients)  # type: ignore[attr-defined]


CASES: dict[str, Callable[[], Any]] = {
    "dp_shard x tp": lambda: trained(mesh(), prepare=lambda model: in_parts(model, mesh())),
    "dp_shard x tp, held": lambda: trained(mesh(), prepare=lambda model: in_parts(model, mesh()), is_held=True),
    "dp_shard x tp, by stage": lambda: by_stage(mesh(), "looped-bfs", lambda model: in_parts(model, mesh())),
    "dp_shard x tp, states": states,
    "dp_shard x tp, gradients": is_sharded_twice,
    "dp_shard x tp, saved": lambda: saved(Path(os.environ["CASES_OUT"]) / "shards of layers"),
    "dp_shard x tp, refused": refused,
}
"""Cases by name, in the order in which ranks run them."""
