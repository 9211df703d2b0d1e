"""Models whose every block reads the outputs of all earlier blocks train under any schedule; each value crosses once per device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.ir import Op
from tests.support.eager import accumulate, assert_same, square_loss


class Block(nn.Module):
    """Attention over the terms of the residual stream, by a query of its own, then a layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.layer = nn.Parameter(torch.randn(width)), nn.Linear(width, width)

    def forward(self, terms: list[torch.Tensor]) -> torch.Tensor:
        stacked = torch.stack(terms)
        weights = (stacked * self.query).sum(-1).softmax(0)
        return self.layer((weights.unsqueeze(-1) * stacked).sum(0)).tanh()


class AttentionResiduals(nn.Module):
    def __init__(self, n_blocks: int = 8, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(n_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        terms = [x * 1.0]
        for block in self.blocks:
            terms.append(block(terms))
        return terms[-1]


def crossing(pipe: pc.Pipeline, *, gradients: bool) -> tuple[int, int]:
    """Return how many values, or gradients, are sent between devices per micro-batch, and how many (value, device) pairs there are."""
    placement, routes = pipe.plan.placement, pipe.program.routes
    pairs = {
        (r.value, placement[end])
        for r in routes
        if r.source >= 0 and r.gradient >= gradients
        for end in r.consumers
        if end >= 0
    }
    pairs -= {(r.value, placement[r.source]) for r in routes if r.source >= 0}
    sent = [
        i.reads[0].value
        for row in pipe.program.rows
        for i in row
        if i.op is Op.SEND and i.peer is not None and i.peer >= 0
    ]
    return sum((value.consumer is not None) == gradients and value.microbatch == 0 for value in sent), len(pairs)


SCHEDULES = [("1f1b", 1), ("interleaved", 2), ("zbv", 2)]


def trained(schedule: str, chunks: int, **options: Any) -> tuple[pc.Pipeline, nn.Module, nn.Module]:
    """Train for two steps, and compare the losses with eager; return the pipeline, its model and the eager one."""
    torch.manual_seed(0)
    model, x = AttentionResiduals(), torch.randn(12, 8)
    reference, n_stages = copy.deepcopy(model), 4 * chunks
    per_stage = 8 // n_stages
    pins = {f"blocks.{i}": i // per_stage for i in range(8)}
    pipe = pc.compile(
        model, n_stages, example_args=(x,), n_microbatches=6, schedule=schedule, loss_fn=square_loss, cost="analytic",
        devices=["cpu"] * 4, pin=pins, **options,
    )  # fmt: skip
    for _ in range(2):
        assert pipe.step(x) == pytest.approx(accumulate(reference, x, 6).item(), rel=1e-6)
    return pipe, model, reference


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dispatch", ["inline", "threads"])
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_values_and_gradients_cross_once_per_device(schedule: str, chunks: int, dispatch: str) -> None:
    pipe, model, reference = trained(schedule, chunks, gradient_sums="device", dispatch=dispatch)
    assert_same(model, reference, tolerance=1e-5)
    for gradients in (False, True):
        sent, pairs = crossing(pipe, gradients=gradients)
        assert sent == pairs
    assert not any(route.gradient for route in pipe.program.routes if route.value == "mul")  # x * 1.0 has no gradient


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_gradients_add_up_as_in_eager_unless_devices_add_them_up(schedule: str, chunks: int) -> None:
    pipe, model, reference = trained(schedule, chunks)
    assert crossing(pipe, gradients=False)[0] == crossing(pipe, gradients=False)[1]
    sent, pairs = crossing(pipe, gradients=True)
    assert sent == pairs if chunks == 1 else sent > pairs
    if chunks == 2:  # one block per stage: all sums are between stages
        for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(parameter.grad, other.grad)


class Late(nn.Module):
    """The value of the first layer is read by the two stages of the last device of a V, and by no other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = y = self.layers[0](x).tanh()
        for number, layer in enumerate(self.layers[1:], start=1):
            y = layer(y + first if number in (3, 4) else y).tanh()
        return y


def test_two_gradients_of_a_device_are_one_message_and_the_sum_is_exact() -> None:
    torch.manual_seed(0)
    model, x = Late(), torch.randn(12, 8)
    reference = copy.deepcopy(model)
    pins = (
        {f"layers_{i}": i for i in range(8)} | {f"tanh_{i}": i for i in range(1, 8)} | {"tanh": 0, "add": 3, "add_1": 4}
    )
    pipe = pc.compile(
        model, 8, example_args=(x,), n_microbatches=6, schedule="zbv", loss_fn=square_loss, cost="analytic",
        devices=["cpu"] * 4, pin=pins,
    )  # fmt: skip
    pipe.step(x)
    accumulate(reference, x, 6)
    summed = [route for route in pipe.program.routes if route.sums]
    assert [route.sums for route in summed] == [((4, 3),)]
    assert crossing(pipe, gradients=True) == (7, 7)
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)
