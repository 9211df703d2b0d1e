"""The code that a program becomes: nothing is kept when the step is over."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pipecompile as pc
from tests.support.eager import square_loss


@pytest.mark.parametrize("dispatch", ["inline", "threads"])
def test_registers_and_channels_are_empty_after_a_step(dispatch: str) -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    pipe = pc.compile(model, 4, loss_fn=square_loss, cost="analytic", dispatch=dispatch, devices=["cpu"] * 4)
    for _ in range(2):
        pipe.step(torch.randn(8, 4))
    assert pipe._last is not None
    (frame,) = pipe._last[0]._idle[dispatch == "threads"]
    assert all(register is None for register in frame.registers)
    assert all(channel is None if dispatch == "inline" else channel.empty() for channel in frame.channels)
    assert not frame.arrivals
    assert not frame.departures


def test_memory_of_saved_activations_follows_the_schedule() -> None:
    """1F1B keeps P - s micro-batches alive on stage s, GPipe all of them: counted on tensors that autograd saved."""
    alive: dict[int, int] = {}
    peaks: dict[int, int] = {}

    class Counting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor, stage: int) -> torch.Tensor:
            ctx.stage = stage  # type: ignore[attr-defined]
            alive[stage] = alive.get(stage, 0) + 1
            peaks[stage] = max(peaks.get(stage, 0), alive[stage])
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            alive[ctx.stage] -= 1  # type: ignore[attr-defined]
            return gradient, None

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for index, layer in enumerate(self.layers):
                x = Counting.apply(layer(x), index)
            return x

    for schedule, expected in (("1f1b", [3, 2, 1]), ("gpipe", [5, 5, 5])):
        pipe = pc.compile(
            Net(), 3, loss_fn=square_loss, cost="analytic", schedule=schedule, n_microbatches=5, devices=["cpu"] * 3
        )
        pipe.step(torch.randn(10, 64))
        plan = pipe.plan
        assert [stage.first for stage in plan.stages] == ["layers.0", "layers.1", "layers.2"]
        alive.clear(), peaks.clear()
        pipe.step(torch.randn(10, 64))
        assert [peaks[s] for s in range(3)] == expected
