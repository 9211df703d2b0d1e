"""A loss function with state of its own: the analysis and the check of a step leave no trace in it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.tracing.reachable_code import searches_kept
from pipecompile.tracing.state.function_state import (
    function_restored,
    names_near,
    reads_objects,
    roots_near,
    tensors_near,
)


class Criterion(nn.Module):
    """A loss with a buffer that is written in place, a tensor that is replaced, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("calls", torch.zeros(()))
        self.mean: torch.Tensor = torch.zeros(())
        self.count = 0

    def forward(self, y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean = self.mean + y.detach().mean()
        self.count += 1
        return F.mse_loss(y * self.weight, t)


CRITERION = Criterion()
CALLS = 0
BY_NAME = {"loss": CRITERION}


def by_global(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    global CALLS  # noqa: PLW0603
    CALLS += 1
    loss: torch.Tensor = CRITERION(y, t)
    return loss


def by_function(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return by_global(y, t)


def unrecorded(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = BY_NAME["loss"](y, t) * (2 if t.sum() > 1e6 else 1)
    return loss


def closed_over(criterion: Criterion) -> Callable[..., Any]:
    return lambda y, t: criterion(y, t)


LOSSES = {
    "a module": CRITERION,
    "a global": by_global,
    "a function that calls another": by_function,
    "a closure": closed_over(CRITERION),
    "a bound method": CRITERION.forward,
    "a partial": partial(by_function),
    "a dict of globals, a branch": unrecorded,
}


@pytest.mark.parametrize("kind", LOSSES)
def test_the_loss_runs_once_per_micro_batch_and_keeps_real_tensors(kind: str) -> None:
    """A criterion behind a lambda got fake tensors as buffers, and counted the runs of the analysis and of the check."""
    CRITERION.calls.zero_()
    CRITERION.mean, CRITERION.count = torch.zeros(()), 0
    buffer, calls = CRITERION.calls, CALLS
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = pc.compile(model, 2, devices=["cpu"] * 2, n_microbatches=2, loss_fn=LOSSES[kind], cost="analytic")
    for steps in (1, 2):
        pipe.step(torch.randn(4, 4), target=torch.randn(4, 4))
        assert CRITERION.count == 2 * steps
        assert CRITERION.calls is buffer
        assert float(buffer) == 2 * steps
        assert type(CRITERION.mean) is torch.Tensor
    assert kind not in ("a global", "a partial") or calls + 4 == CALLS


def test_contents_are_restored() -> None:
    before, CRITERION.weight.grad = CRITERION.weight.detach().clone(), None
    with function_restored(by_function):
        with torch.no_grad():
            CRITERION.weight.mul_(3.0)
        CRITERION.count += 5
        by_global(torch.ones(2, 4), torch.ones(2, 4)).backward()
    assert torch.equal(CRITERION.weight, before)
    assert CRITERION.weight.grad is None


def test_all_tensors_of_a_large_model_near_a_loss_are_restored() -> None:
    """Only the nearest containers are searched: the last layers of a large model kept what the trial of a loss wrote."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)) for _ in range(400)])

    def loss(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.add_(1)
        return F.mse_loss(y, t)

    before = {name: value.clone() for name, value in model.state_dict().items()}
    with function_restored(loss):
        loss(torch.ones(1), torch.zeros(1))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {id(tensor) for tensor in model.buffers()} <= tensors_near(loss).keys()


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("loss", "reads"),
    [
        (Criterion().forward, True),
        (Criterion(), True),
        (partial(lambda y, t, criterion: criterion(y, t), criterion=Criterion()), True),
        (nn.MSELoss(), False),
        (nn.MSELoss().forward, False),
        (F.mse_loss, False),
        (partial(F.cross_entropy, label_smoothing=0.1), False),
    ],
)
def test_the_object_of_a_method_and_what_a_partial_binds_are_read(loss: Callable[..., Any], reads: bool) -> None:
    assert reads_objects(loss) is reads


SEEN = [0] * 2000
LAST: Any = None


class Reader(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + len(SEEN)


def keeping(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    global LAST  # noqa: PLW0603
    LAST = x
    return x + len(SEEN)


def test_names_follow_from_a_kept_search_and_are_computed_once_and_sizes_of_containers_are_read_anew(monkeypatch):
    model = Reader()
    with searches_kept():
        first = names_near(model)
        assert names_near(model) is first
        assert not any(name == "LAST" for _, name in first.names)
        assert not any(one is SEEN for one in roots_near(model))  # a registry
        monkeypatch.setattr(Reader, "forward", keeping)
        assert any(name == "LAST" for _, name in names_near(model).names)
        roots_near(model)
        SEEN.clear()
        assert any(one is SEEN for one in roots_near(model))


CALLS = 0


class Counting:
    """A loss that is an object, and changes a global."""

    def __call__(self, y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        global CALLS  # noqa: PLW0603
        CALLS += 1
        return F.mse_loss(y, t)


def test_the_call_of_an_object_changes_globals_once_per_micro_batch(monkeypatch):
    monkeypatch.setitem(globals(), "CALLS", 0)
    x, model = torch.randn(8, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = pc.compile(model, 2, example_args=(x,), n_microbatches=4, loss_fn=Counting(), cost="analytic")
    assert CALLS == 0
    pipe.step(x, target=x)
    assert CALLS == 4
