"""Cases of `reshard_after_forward`: training equals eager, and fewer parameters are whole at a time. Run as in cases.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import pipecompile as pc
from pipecompile.distributed.data_parallel.sharded_parameter import ShardedParameter
from pipecompile.ir import Kind
from tests.distributed.meshes import blocks, distance_of, mesh_of, trained

LIMITS = (1e6, 16e3, 14e3, 1e3)
"""Bytes: everything fits, stages are freed between their blocks, and nothing fits."""


def train(prepare: Callable[[nn.Module], Any] = lambda _: None) -> dict[str, Any]:
    """Train in four stages on one pipeline device, gathered by the keyword alone."""
    mesh = mesh_of((2, 2, 1), "dp", "dp_shard", "pp")
    return trained(mesh, prepare=prepare, n_stages=4, schedule="looped-bfs", reshard_after_forward=True)


def with_piece(model: nn.Module) -> None:
    """Let a block be a piece that is kept whole: a hook branches on values."""

    def checked(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        return output if output.sum() < 1e9 else output * 0

    model[1].register_forward_hook(checked)  # type: ignore[index, operator]


def compiled(limit: float | None = None, *, is_resharded: bool = True) -> tuple[pc.Pipeline, torch.Tensor]:
    torch.manual_seed(3)
    mesh, x = mesh_of((2, 2, 1), "dp", "dp_shard", "pp"), torch.randn(6, 6).double()
    options: dict[str, Any] = {
        "schedule": "looped-bfs",
        "n_microbatches": 3,
        "balance": [1, 1, 1, 2],
        "cost": "analytic",
    }
    options |= {"loss_fn": lambda y: y.square().mean(), "reshard_after_forward": is_resharded, "memory_limit": limit}
    return pc.compile(blocks(), 4, mesh=mesh, example_args=(x,), **options), x


def whole_bytes(*, is_resharded: bool) -> int:
    """Return the most bytes of gathered parameters that a step holds at a time."""
    pipe, x = compiled(is_resharded=is_resharded)
    kept, largest, real_take = dict[int, ShardedParameter](), [0], ShardedParameter.take

    def take(self: ShardedParameter) -> None:
        real_take(self)
        kept[id(self)] = self
        sizes = (one.memory.untyped_storage().nbytes() for one in kept.values() if one.memory is not None)
        largest[0] = max(largest[0], sum(sizes))

    with patch.object(ShardedParameter, "take", take):
        pipe.step(x)
    return largest[0]


def limits() -> list[Any]:
    """Return, for each limit, how often a step gathers stages, and the loss; or the error."""
    found: list[Any] = []
    for limit in LIMITS:
        try:
            pipe, x = compiled(limit)
            count = sum(action.kind is Kind.UNSHARD for row in pipe.schedule.rows for action in row)
            found.append([count, float(pipe.step(x))])
        except pc.PipecompileError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def without_parameters() -> dict[str, float]:
    """Return by how much losses, gradients and outputs are off eager, on two ranks of which the second has stages without parameters."""
    torch.manual_seed(3)
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()), torch.randn(8, 6)
    eager, mesh = copy.deepcopy(model), mesh_of((2, 2), "dp_shard", "pp")
    part, pin = x.chunk(2)[mesh.get_local_rank("dp_shard")], {str(stage): stage for stage in range(4)}
    options: dict[str, Any] = {
        "loss_fn": lambda y: y.square().mean(),
        "cost": "analytic",
        "reshard_after_forward": True,
    }
    pipe = pc.compile(
        model, 4, mesh=mesh, example_args=(part,), schedule="looped-bfs", n_microbatches=2, pin=pin, **options
    )
    whole = eager(x).square().mean()
    whole.backward()
    found = {"loss": float(pipe.step(part) - whole.detach())}
    for name, parameter in pipe.named_parameters():
        found[name] = distance_of(parameter.grad, eager.get_parameter(name).grad)
    with torch.no_grad():
        found["output"] = distance_of(pipe(part), eager(part))
    found["evaluated"] = float(pipe.evaluate([(part,)]).loss - whole.detach())
    pipe.load_state_dict({name: value * 0 for name, value in pipe.full_state_dict().items()})
    return found | {"loaded": float(pipe.step(part))}


CASES: dict[str, Callable[[], Any]] = {
    "resharded": train,
    "resharded, with a piece": lambda: train(with_piece),
    "resharded, without parameters on a rank": without_parameters,
    "whole bytes": lambda: [whole_bytes(is_resharded=each) for each in (False, True)],
    "resharded under limits": limits,
}
