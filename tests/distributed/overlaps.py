"""Cases of the overlap of gradient reduction with the last backwards of a row. Run on four ranks, as in cases.py."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import pipecompile as pc
from pipecompile.driver.programs import step_executable
from pipecompile.runtime.registers import Frame
from tests.distributed.case_models import distance
from tests.distributed.cases import pair_mesh
from tests.distributed.meshes import SAMPLES, distance_of, mesh_of, part_of

WIDTH = 3
BACK = ("B", "I", "W")


class Net(nn.Sequential):
    """Four layers. With `shared`, layers 0 and 2 have one weight, layers 0 and 3 one bias, and one parameter is not used."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        if shared:
            self[2].weight, self[3].bias = self[0].weight, self[0].bias
            self.idle = nn.Parameter(torch.zeros(5))


def overlapped(mesh: DeviceMesh, *schedules: str, count: int = 4, shared: bool = False, late_loss: bool = False) -> Any:
    """Run a step under each schedule, and one more with the third layer frozen.

    Return, per step, the backwards and buckets in the order in which they start, the number of buckets that were counted, and the
    largest difference of gradients to those of eager on the whole batch.
    """
    torch.manual_seed(11)
    model, x, y = Net(shared=shared).double(), *torch.randn(2, 2 * SAMPLES, WIDTH).double()
    eager, half, results = copy.deepcopy(model), part_of(mesh), []
    part = slice(2 * half.start, 2 * half.stop)
    pipe = pc.compile(model, 4, mesh=mesh, example_args=(x[part],), n_microbatches=count, schedule=schedules[0], balance=[1] * 4,
                      loss_fn=regular(model) if late_loss else distance, cost="analytic", tied="apart")  # fmt: skip
    for schedule in (*schedules, schedules[-1]):
        if len(results) == len(schedules):
            for name, parameter in (*pipe.named_parameters(), *eager.named_parameters()):
                parameter.requires_grad_(not name.startswith("2."))
            pipe.prepare(x[part])  # records the model anew
        pipe.reschedule(schedule)
        before = pipe.replicas.reductions
        with logged(pipe, count) as log:
            pipe.step(x[part], target=y[part])
        (regular(eager) if late_loss else distance)(eager(x), y).backward()
        results.append({"log": " ".join(log), "counted": pipe.replicas.reductions - before, "off": off(pipe, eager)})
        for each in (pipe, eager):
            each.zero_grad()
    return results


def unlike() -> Any:
    """Run two programs on both copies, one after the other; then a different one on each copy; then the same again.

    Return the sums of gradients after each step.
    """
    torch.manual_seed(12)
    mesh, sums = pair_mesh(), []
    pipe = pc.compile(Net(shared=False), 4, mesh=mesh, n_microbatches=4, schedule="looped-bfs", balance=[1] * 4,
                      loss_fn=lambda y: y.mean(), cost="analytic")  # fmt: skip
    for samples in (8, 3, 8 if mesh.get_local_rank("dp") else 3, 8):
        pipe.step(torch.ones(samples, WIDTH))
        sums.append(sum(float(parameter.grad.sum()) for parameter in pipe.parameters()))
    return {"sums": sums}


def regular(model: Net) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a loss that also uses a weight of the first layer, which a V-shaped schedule puts on the rank of the last layer."""
    return lambda output, target: distance(output, target) + model[0].weight.square().sum()


@contextmanager
def logged(pipe: Any, count: int) -> Iterator[list[str]]:
    """Yield a log of the backwards of this rank and of the size of each bucket, in numbers."""
    log: list[str] = []
    executable = step_executable(pipe._cache.latest, count, with_target=True)
    code, reduce = executable.inline, dist.all_reduce

    def run_logged(position: int, frame: Frame) -> None:
        action = executable.program.rows[executable.device][position].action
        if action is not None and action.kind.value in BACK:
            log.append(str(action))
        code.flat[position](frame)

    def logged_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.numel() > 1 and tensor.is_floating_point():  # not the number of the recording, on which ranks agree
            log.append(f"[{tensor.numel()}]")
        return reduce(tensor, *args, **kwargs)

    flat = tuple(lambda frame, position=position: run_logged(position, frame) for position in range(len(code.flat)))
    with (
        patch.dict(executable.__dict__, {"inline": replace(code, flat=flat)}),
        patch.object(dist, "all_reduce", logged_reduce),
    ):
        yield log


def off(pipe: nn.Module, eager: nn.Module) -> float:
    expected, worst = dict(eager.named_parameters()), 0.0
    for name, parameter in pipe.named_parameters():
        assert (parameter.grad is None) == (expected[name].grad is None), name
        if parameter.grad is not None:
            worst = max(worst, distance_of(parameter.grad, expected[name].grad))
    return worst


CASES: dict[str, Callable[[], Any]] = {
    "overlapped": lambda: overlapped(pair_mesh(), "interleaved", "interleaved-zb"),
    "overlapped, shared": lambda: overlapped(pair_mesh(), "interleaved", shared=True),
    "overlapped, loss": lambda: overlapped(pair_mesh(), "zbv", count=2, late_loss=True),
    "overlapped, parts": lambda: overlapped(mesh_of((2, 2), "dp_shard", "pp"), "interleaved"),
    "overlapped, hsdp": lambda: overlapped(mesh_of((2, 2, 1), "dp", "dp_shard", "pp"), "gpipe"),
    "unlike": unlike,
}
"""Cases by name, in the order in which ranks run them."""
