"""When copies of a pipeline put their gradients together: beside the last backwards of the row. Four ranks, called as in cases.py."""

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
from pipecompile.runtime.registers import Frame
from tests.distributed.cases import distance, pair_mesh
from tests.distributed.meshes import SAMPLES, distance_of, mesh_of, part_of

WIDTH = 3
BACK = ("B", "I", "W")


class Net(nn.Sequential):
    """Four layers; when they share, the first and the third have one weight, the first and the last one bias, and a parameter is
    not used.
    """

    def __init__(self, *, shared: bool) -> None:
        super().__init__(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        if shared:
            self[2].weight, self[3].bias = self[0].weight, self[0].bias
            self.idle = nn.Parameter(torch.zeros(5))


def overlapped(mesh: DeviceMesh, *schedules: str, count: int = 4, shared: bool = False, late_loss: bool = False) -> Any:
    """A step under each schedule, and one more with the third layer frozen: backwards and messages in the order in which they
    began, how many messages were counted, and how far gradients are from those of eager on the whole batch.
    """
    torch.manual_seed(11)
    model, x, y = Net(shared=shared).double(), *torch.randn(2, 2 * SAMPLES, WIDTH).double()
    eager, half, found = copy.deepcopy(model), part_of(mesh), []
    part = slice(2 * half.start, 2 * half.stop)
    pipe = pc.compile(model, 4, mesh=mesh, example_args=(x[part],), n_microbatches=count, schedule=schedules[0], balance=[1] * 4,
                      loss_fn=regular(model) if late_loss else distance, cost="analytic", tied="apart")  # fmt: skip
    for schedule in (*schedules, schedules[-1]):
        if len(found) == len(schedules):
            for name, parameter in (*pipe.named_parameters(), *eager.named_parameters()):
                parameter.requires_grad_(not name.startswith("2."))
        pipe.reschedule(schedule)
        before = pipe.replicas.reductions
        with noted(pipe, count) as log:
            pipe.step(x[part], target=y[part])
        (regular(eager) if late_loss else distance)(eager(x), y).backward()
        found.append({"log": " ".join(log), "counted": pipe.replicas.reductions - before, "off": off(pipe, eager)})
        for each in (pipe, eager):
            each.zero_grad()
    return found


def unlike() -> Any:
    """Copies that ran two programs together, each of them once; then each another one; then the same: what is said, and the sums of
    gradients after each step.
    """
    torch.manual_seed(12)
    mesh, said, sums = pair_mesh(), "", []
    pipe = pc.compile(Net(shared=False), 4, mesh=mesh, n_microbatches=4, schedule="looped-bfs", balance=[1] * 4,
                      loss_fn=lambda y: y.mean(), cost="analytic")  # fmt: skip
    for samples in (8, 3, 8 if mesh.get_local_rank("dp") else 3, 8):
        try:
            pipe.step(torch.ones(samples, WIDTH))
        except pc.PlanError as error:
            said = str(error)
        sums.append(sum(float(parameter.grad.sum()) for parameter in pipe.parameters()))
    return {"said": said, "sums": sums}


def regular(model: Net) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A loss that uses a weight of the first layer, too, which in a V is on the rank of the last one."""
    return lambda output, target: distance(output, target) + model[0].weight.square().sum()


@contextmanager
def noted(pipe: Any, count: int) -> Iterator[list[str]]:
    """The backwards of this rank, and how many numbers go into each message that puts gradients together."""
    log: list[str] = []
    executable = pipe.builds.latest.step(count, with_target=True)
    code, reduce = executable.inline, dist.all_reduce

    def note(position: int, frame: Frame) -> None:
        action = executable.program.rows[executable.device][position].action
        if action is not None and action.kind.value in BACK:
            log.append(str(action))
        code.flat[position](frame)

    def noted_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.numel() > 1:
            log.append(f"[{tensor.numel()}]")
        return reduce(tensor, *args, **kwargs)

    flat = tuple(lambda frame, position=position: note(position, frame) for position in range(len(code.flat)))
    with (
        patch.dict(executable.__dict__, {"inline": replace(code, flat=flat)}),
        patch.object(dist, "all_reduce", noted_reduce),
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
"""In this order."""
