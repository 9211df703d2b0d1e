"""Cases of accumulation under `no_sync`, on two copies of a pipeline of two stages. Run on four ranks, as in cases.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import pipecompile as pc
from pipecompile.torch_private.dtensors import local
from tests.distributed.cases import mesh_of
from tests.distributed.meshes import distance_of

SAMPLES = 8


def model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def batch(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SAMPLES, size, dtype=torch.float64, generator=generator) for size in (4, 2)]


class Run:
    """A pipeline on two copies, and the bounds of the part of the batch of this one."""

    def __init__(self, kind: str) -> None:
        self.mesh: DeviceMesh = mesh_of((2, 2), kind, "pp")
        self.is_first = self.mesh.get_local_rank(kind) == 0
        example, options = batch(0)[0][:5], {"loss_fn": nn.functional.mse_loss, "n_microbatches": 2}
        self.pipe = pc.compile(model(), 2, mesh=self.mesh, example_args=(example,), cost="analytic", **options)

    def step(self, seed: int, bound: int = 5) -> float:
        """Step on a batch of which the first copy has so many samples."""
        x, y = (one[:bound] if self.is_first else one[bound:] for one in batch(seed))
        return self.pipe.step(x, target=y).item()

    def off(self, seeds: Sequence[int]) -> float:
        """Return the largest difference to the gradients of the losses of whole batches in one process, and clear the gradients."""
        eager = model()
        for x, y in map(batch, seeds):
            nn.functional.mse_loss(eager(x), y).backward()
        expected = {name: parameter.grad for name, parameter in eager.named_parameters()}
        found = max(distance_of(parameter.grad, expected[name]) for name, parameter in self.pipe.named_parameters())
        self.pipe.zero_grad()
        return found

    def frozen(self) -> float:
        """Freeze all biases between two steps, the first of them on batch 9, and return how far gradients are off."""
        eager = model()
        for index, seed in enumerate((9, 10)):
            x, y = batch(seed)
            nn.functional.mse_loss(eager(x), y).backward()
            for net in () if index else (eager, self.pipe):
                for name, parameter in net.named_parameters():
                    parameter.requires_grad_("bias" not in name)
        self.step(10)
        pairs = [(one, dict(eager.named_parameters())[name]) for name, one in self.pipe.named_parameters()]
        return max(distance_of(one.grad, other.grad) for one, other in pairs)

    @property
    def is_hidden(self) -> bool:
        """Whether no gradient is a number."""
        return all(one.grad is not None and bool(local(one.grad).isnan().all()) for one in self.pipe.parameters())


def accumulated(kind: str) -> dict[str, Any]:
    """Return how far gradients are off: with a sum before, with a copy without samples, and where the script clears what is held."""
    run = Run(kind)
    run.step(1)
    with run.pipe.no_sync():
        run.step(2)
        run.step(3, bound=6)
    is_hidden = run.is_hidden
    run.step(4)
    after_sum = run.off([1, 2, 3, 4])
    with run.pipe.no_sync():
        run.step(5, bound=0)
    run.step(6)
    empty = run.off([5, 6])
    with run.pipe.no_sync():
        run.step(7)
    run.pipe.zero_grad()
    run.step(8)
    cleared = run.off([8])
    with run.pipe.no_sync():
        run.step(9, bound=0)
    frozen = run.frozen()
    return {"off": [after_sum, empty, cleared, frozen], "is_hidden": is_hidden}


def refused(kind: str) -> list[str]:
    """Return the errors of a script that uses gradients which the copies have not summed, and of ranks that are not of one mind."""
    run = Run(kind)
    optimizer = torch.optim.AdamW(run.pipe.parameters())
    with run.pipe.no_sync():
        run.step(1)
    errors = [_error_of(optimizer.step), _error_of(lambda: run.pipe.clip_grad_norm_(1.0))]
    for parameter in run.pipe.parameters():
        torch._foreach_zero_([parameter.grad])  # as an optimizer with foreach=True sets gradients to zero
    errors.append(_error_of(lambda: run.step(2)))
    run.pipe.zero_grad()
    off = run.step(3) - run.step(3)
    with run.pipe.no_sync() if run.mesh.get_rank() == 0 else torch.enable_grad():
        errors.append(_error_of(lambda: run.step(4)))
    return [*errors, f"off by {off}"]


def cleared_alone(kind: str) -> str:
    """Return the error of a step after one copy alone has cleared what it held."""
    run = Run(kind)
    with run.pipe.no_sync():
        run.step(1)
    if run.is_first:
        run.pipe.zero_grad()
    return _error_of(lambda: run.step(2))


def _error_of(call: Callable[[], Any]) -> str:
    try:
        return f"no error: {call()}"
    except pc.PipecompileError as error:
        return f"{type(error).__name__}: {error}"


CASES: dict[str, Callable[[], Any]] = {
    "held": lambda: accumulated("dp"),
    "held shards": lambda: accumulated("dp_shard"),
    "held, refused": lambda: refused("dp"),
    "held shards, refused": lambda: refused("dp_shard"),
    "held, cleared alone": lambda: cleared_alone("dp"),
    "held shards, cleared alone": lambda: cleared_alone("dp_shard"),
}
"""Cases by name, in the order in which ranks run them."""
