"""A loss that reads what the forward left on the model: a recomputation of the last stage reads that of its own micro-batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from tests.support.eager import assert_same

CHECKPOINTS = ("never", "always", "except_last", [False, True])


class Leaves(nn.Module):
    """Leaves a feature, a count and two lists on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
        self.feature: Any = None
        self.calls = 0
        self.early: list[torch.Tensor] = []
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](x)
        self.early.append(first)
        hidden = self.layers[1](first)
        self.feature = hidden
        self.calls += 1
        self.seen.append(hidden.mean())
        return self.layers[4](self.layers[3](self.layers[2](hidden)))


def loss_of(model: Leaves, kind: str) -> Any:
    """Return a loss that reads one of them."""

    def weighted(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        single = F.cross_entropy(output, target, reduction="none")
        if kind == "feature":
            return (single * (1 + model.feature.mean(1))).mean()
        if kind == "detached feature":
            return (single * (1 + model.feature.detach().mean(1))).mean()
        if kind == "list":
            return single.mean() * (1 + model.seen[-1].detach() * len(model.seen))
        if kind == "list of the first layer":
            return single.mean() * (1 + model.early[-1].detach().mean() * len(model.early))
        return single.mean() * model.calls

    return weighted


def step_of_eager(model: Leaves, x: torch.Tensor, y: torch.Tensor, kind: str) -> float:
    total = 0.0
    for part, target in zip(x.chunk(4), y.chunk(4), strict=True):
        loss = loss_of(model, kind)(model(part), target) / 4
        loss.backward()
        total += loss.item()
    return total


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=str)
@pytest.mark.parametrize("kind", ["feature", "detached feature", "calls", "list", "list of the first layer"])
def test_the_loss_reads_what_the_forward_of_its_micro_batch_left(kind: str, checkpoint: Any, schedule: str) -> None:
    torch.manual_seed(0)
    model, x, y = Leaves(), torch.randn(8, 8), torch.randint(4, (8,))
    twin = copy.deepcopy(model)
    pipe = pc.compile(
        model, 2, n_microbatches=4, example_args=(x,), cost="analytic", loss_fn=loss_of(model, kind),
        dispatch="inline", split_before=["layers.3"], checkpoint=checkpoint, schedule=schedule, loss_reduction="mean",
    )  # fmt: skip

    for _ in range(2):
        loss, expected = pipe.step(x, target=y), step_of_eager(twin, x, y, kind)
        assert loss.item() == pytest.approx(expected, rel=1e-6)

    assert_same(model, twin)
    assert (model.calls, len(model.seen)) == (twin.calls, len(twin.seen))
    assert torch.equal(model.feature, twin.feature)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_list_is_read_as_it_was(checkpoint: str) -> None:
    torch.manual_seed(0)
    model, x, y = Leaves(), torch.randn(8, 8), torch.randint(4, (8,))
    twin = copy.deepcopy(model)

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target) * (1 + model.seen[-1].detach() * len(model.seen))

    pipe = pc.compile(
        model, 2, n_microbatches=4, example_args=(x,), cost="analytic", loss_fn=loss_fn, dispatch="inline",
        split_before=["layers.3"], checkpoint=checkpoint, schedule="gpipe", loss_reduction="mean", check=False,
    )  # fmt: skip
    pipe.step(x, target=y)

    assert len(model.seen) == 4
    for part, target in zip(x.chunk(4), y.chunk(4), strict=True):
        loss = F.cross_entropy(twin(part), target)
        (loss * (1 + twin.seen[-1].detach() * len(twin.seen)) / 4).backward()
    assert_same(model, twin)


def test_a_recomputation_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    class Chatty(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() < torch.inf:  # kept whole, for it reads a value
                print("layer")
            return x * 2

    def loss(output: torch.Tensor) -> torch.Tensor:
        print("loss")
        return output.mean()

    model, x = nn.Sequential(nn.Linear(4, 4), Chatty(), nn.Linear(4, 4)), torch.randn(6, 4)
    pipe = pc.compile(model, 2, example_args=(x,), n_microbatches=3, loss_fn=loss, cost="analytic", checkpoint="always")
    pipe.step(x)
    capsys.readouterr()
    pipe.step(x)
    assert sorted(capsys.readouterr().out.split()) == ["layer"] * 3 + ["loss"] * 3
