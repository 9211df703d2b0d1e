"""Custom autograd functions that run modules with state: what is around them is kept whole, so that the state is that of the plain loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from tests.support.eager import accumulate, assert_same, square_loss


class Counting(nn.Module):
    """Has a counter, a buffer that counts, and a list, which each call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.calls, self.seen = nn.Parameter(torch.ones(4)), 0, []
        self.register_buffer("counted", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.counted += 1
        self.seen.append(len(self.seen))
        return x * self.scale


class Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, module: nn.Module) -> torch.Tensor:
        ctx.save_for_backward(x, scale)
        return module(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x).sum(0), None


class Applied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Counting()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Apply.apply(x, self.inner.scale, self.inner)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_state_changes_once_a_microbatch(checkpoint: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Applied(), nn.Linear(4, 4))
    eager, x = copy.deepcopy(model), torch.randn(8, 4)
    options: dict[str, Any] = {"loss_fn": square_loss, "cost": "analytic", "devices": ["cpu"] * 2}
    pipe = pc.compile(model, 2, n_microbatches=2, checkpoint=checkpoint, **options)
    with pytest.warns(pc.RecordingWarning, match="Apply, an autograd function, writes buffers"):
        pipe.prepare(x)
    for _ in range(2):
        pipe.step(x)
        accumulate(eager, x, 2)
    mine, other = model[1].inner, eager[1].inner
    assert (mine.calls, mine.seen) == (other.calls, other.seen) == (4, [0, 1, 2, 3])
    assert_same(model, eager)


def test_the_whole_model_is_refused_with_its_line() -> None:
    with pytest.raises(pc.TraceError, match=r"(?s)PC114.*Apply\.apply changes.*where .*in Applied\.forward"):
        pc.trace(Applied(), torch.randn(2, 4))


def test_a_function_that_runs_a_module_without_state_is_a_node() -> None:
    class Plain(Applied):
        def __init__(self) -> None:
            super().__init__()
            self.inner.forward = lambda x: x * self.inner.scale

    assert "Apply" in str(pc.trace(Plain(), torch.randn(2, 4)))


CALLS = {"forward": 0}


class CountsCalls(torch.autograd.Function):
    seen = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        CALLS["forward"] += 1
        CountsCalls.seen += 1
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return CountsCalls.apply(self.layer(x))


def test_a_count_that_a_node_advances_is_right_and_no_warning_says_otherwise(recwarn: pytest.WarningsRecorder) -> None:
    x = torch.randn(6, 4)
    pipe = pc.compile(
        Counted(), 1, example_args=(x,), n_microbatches=3, loss_fn=square_loss, cost="analytic", devices=["cpu"]
    )
    assert (CALLS["forward"], CountsCalls.seen) == (0, 0)
    for step in (1, 2):
        pipe.step(x)
        assert (CALLS["forward"], CountsCalls.seen) == (3 * step, 3 * step)
    assert not [one for one in recwarn if issubclass(one.category, pc.RecordingWarning)]
