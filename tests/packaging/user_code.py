"""Code as a user writes it: `make wheel` runs it, and mypy and pyright in strict mode check it, where only the wheel is installed."""
# pyright: strict, reportUnknownMemberType=false
# The rule that is off is about torch alone: SGD.step has a closure without a type.

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import pipecompile as pc


def train(steps: int) -> float:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    pipe: pc.Pipeline = pc.compile(
        model, 2, example_args=(x,), devices=["cpu", "cpu"], loss_fn=mse_loss, cost="analytic"
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    loss = torch.zeros(())
    for _ in range(steps):
        loss = first_tensor(pipe.step(x, target=y))
        optimizer.step()
        optimizer.zero_grad()
    timeline: pc.Timeline = pipe.simulate()
    assert timeline.makespan > 0
    plan: pc.Plan = pipe.plan
    assert plan.n_stages == 2
    return loss.item()


def first_tensor(value: object) -> Tensor:
    assert isinstance(value, Tensor)
    return value


if __name__ == "__main__":
    schedule: pc.Schedule = pc.build_schedule("zb-h1", 4, 8)
    pc.verify(schedule)
    print(pc.__version__, schedule.name, f"loss {train(3):.3f}")
