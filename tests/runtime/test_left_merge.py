"""After `pipe(x)`, the model has what a call on the whole mini-batch leaves, merged from what its micro-batches have left."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.errors import InputError
from tests.support.eager import square_loss


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 2)
        self.register_buffer("shown", None, persistent=False)
        self.seen, self.calls, self.rows = [], 0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).tanh()
        self.leave(h)
        return self.second(h)

    def leave(self, h: torch.Tensor) -> None:
        """Leave something on the model."""


class InBuffer(Net):
    def leave(self, h: torch.Tensor) -> None:
        self.shown = h.detach()


class InAttribute(Net):
    def leave(self, h: torch.Tensor) -> None:
        self.last = {"rows": h.detach(), "total": h.detach().sum(0), "pair": (h.detach().amax(), 3)}


class WithTime(Net):
    def leave(self, h: torch.Tensor) -> None:
        self.last = h.detach().T  # the batch is the second dimension


class Appends(Net):
    def leave(self, h: torch.Tensor) -> None:
        self.seen.append(h.detach())
        self.seen.append(h.detach() * 2)


class Refills(Net):
    def leave(self, h: torch.Tensor) -> None:
        self.seen.clear()
        self.seen.append(h.detach())


class Queues(Net):
    """Keeps the latest tensors: those of micro-batches drop what the call before has left."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = deque(maxlen=3)

    def leave(self, h: torch.Tensor) -> None:
        self.seen.append(h.detach())
        self.seen.append(h.detach() * 2)


class Counts(Net):
    def leave(self, h: torch.Tensor) -> None:
        self.calls += 1
        self.rows += len(h)


def left_on(model: Net) -> object:
    return [model.shown, getattr(model, "last", None), list(model.seen), model.calls, model.rows]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("make", [InBuffer, InAttribute, WithTime, Appends, Queues, Refills, Counts])
def test_a_call_leaves_what_the_model_leaves(make: Callable[[], Net], grad: bool) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(10, 4)
    twin = copy.deepcopy(model)
    pipe = pc.compile(
        model, 2, example_args=(x,), n_microbatches=3, cost="analytic", devices=["cpu"] * 2, loss_fn=square_loss
    )
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            pipe(x)
            twin(x)
            torch.testing.assert_close(left_on(model), left_on(twin))


def test_a_step_leaves_what_the_loop_leaves() -> None:
    model, x = InBuffer(), torch.randn(6, 4)
    pipe = pc.compile(
        model, 2, example_args=(x,), n_microbatches=3, cost="analytic", devices=["cpu"] * 2, loss_fn=square_loss
    )
    pipe.step(x)
    torch.testing.assert_close(model.shown, model.first(x[4:]).tanh().detach())


class WithGraph(Net):
    def leave(self, h: torch.Tensor) -> None:
        self.last = h


def test_a_merged_tensor_refuses_a_backward() -> None:
    model, x = WithGraph(), torch.randn(6, 4)
    pipe = pc.compile(model, 2, example_args=(x,), n_microbatches=3, cost="analytic", devices=["cpu"] * 2)
    pipe(x)
    torch.testing.assert_close(model.last, model.first(x).tanh())
    with pytest.raises(InputError, match="has no gradient"):
        model.last.sum().backward()
