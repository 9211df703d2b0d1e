"""Schedules that run micro-batches out of order: what forwards write differs from the plain loop, with a warning."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc

TURNED = pc.Schedule.from_csv("0F1,0F0,0F3,0F2,0B1,0B0,0B3,0B2\n1F1,1B1,1F0,1B0,1F3,1B3,1F2,1B2\n")


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
    )


def _pipe(model: nn.Module, batch_norm: str) -> tuple[pc.Pipeline, torch.Tensor, torch.Tensor]:
    x, target = torch.randn(8, 6), torch.randint(3, (8,))
    pipe = pc.compile(
        model, 2, example_args=(x,), n_microbatches=4, loss_fn=F.cross_entropy, schedule=TURNED, batch_norm=batch_norm, cost="analytic"
    )  # fmt: skip
    return pipe, x, target


def test_statistics_in_another_order_are_warned_of_once() -> None:
    pipe, x, target = _pipe(_model(), "each")
    with pytest.warns(pc.RecordingWarning, match=r"order 1, 0, 3, 2, and writes 1.running_mean, 1.running_var"):
        pipe.step(x, target=target)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.step(x, target=target)


@pytest.mark.parametrize(("batch_norm", "in_eval"), [("deferred", False), ("each", True)])
def test_what_is_not_written_in_an_order_gets_no_warning(batch_norm: str, in_eval: bool) -> None:
    pipe, x, target = _pipe(_model().train(not in_eval), batch_norm)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.step(x, target=target)


def test_what_a_hook_leaves_is_named() -> None:
    model = _model().eval()
    model[0].register_forward_hook(lambda layer, _inputs, made: setattr(layer, "last", made.detach()))
    pipe, x, target = _pipe(model, "each")
    with pytest.warns(
        pc.RecordingWarning, match=r"writes what its hooks and pieces kept whole leave: what it leaves is not what"
    ):
        pipe.step(x, target=target)


COPIES = pc.Schedule.from_csv("0F0,0F1,1F2,1F3,1B3,1B2,0B0,0B1\n0F2,0F3,1F0,1F1,1B0,1B1,0B2,0B3\n")
"""Each row runs the forwards of a stage in order, and one thread runs those of the second row first."""


def _step_of_copies(**options: Any) -> None:
    x, target, shared = torch.randn(8, 6), torch.randint(3, (8,)), {"loss_fn": F.cross_entropy, "cost": "analytic"}
    pipe = pc.compile(
        _model(), 2, example_args=(x,), n_microbatches=4, schedule=COPIES, batch_norm="each", **shared, **options
    )
    pipe.step(x, target=target)


def test_copies_of_a_stage_run_in_the_order_of_one_thread() -> None:
    """The rows alone have each stage in order: the statistics differed without a word."""
    with pytest.warns(pc.RecordingWarning, match=r"stage 0 runs .* in the order 2, 3, 0, 1, and writes 1.running_mean"):
        _step_of_copies()


def test_copies_of_a_stage_in_threads_have_no_order() -> None:
    with pytest.warns(pc.RecordingWarning, match=r"in the order in which threads come to them, and writes 1.running_m"):
        _step_of_copies(dispatch="threads")


class _Counts:
    """A loss that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return F.cross_entropy(output, target) * self.calls


class _Holds(_Counts):
    """A loss that counts nothing."""

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target) * (1 + self.calls)


@pytest.mark.parametrize(("kind", "warns"), [(_Counts, True), (_Holds, False)])
@pytest.mark.parametrize(
    "options", [{"schedule": TURNED}, {"schedule": COPIES, "dispatch": "threads"}], ids=["turned", "copies"]
)
def test_a_loss_with_state_is_warned_of(kind: type[_Counts], warns: bool, options: dict[str, Any]) -> None:
    """The losses of micro-batches were swapped without a word."""
    pipe = pc.compile(_model().eval(), 2, n_microbatches=4, loss_fn=kind(), cost="analytic", **options)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        for _ in range(2):
            pipe.step(torch.randn(8, 6), target=torch.randint(3, (8,)))
    texts = [str(one.message) for one in given if "and writes what the loss leaves" in str(one.message)]
    assert len(texts) == warns, given


class _Lengths(nn.Module):
    """Statistics, and another way for long sequences, of which there is a recording of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        means = self.first(x).mean(1)
        return self.last(self.norm(means * 2 if x.shape[1] > 4 else means).tanh())


def test_a_list_of_several_recordings_is_warned_of() -> None:
    """A list of one recording was, and one of several was not."""
    pipe = pc.compile(
        _Lengths(), 2, devices=["cpu"] * 2, n_microbatches=4, loss_fn=F.cross_entropy, schedule=TURNED, batch_norm="each", cost="analytic"
    )  # fmt: skip
    with pytest.warns(pc.RecordingWarning, match=r"order 1, 0, 3, 2, and writes norm.running_mean"):
        pipe.step(microbatches=[(torch.randn(2, n, 6), torch.randint(3, (2,))) for n in (3, 7, 3, 7)])


def test_buffers_are_looked_at_once_and_not_in_every_step() -> None:
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(8, 6)
    pipe = pc.compile(
        model, 2, example_args=(x,), n_microbatches=4, loss_fn=F.cross_entropy, schedule=TURNED, cost="analytic"
    )
    target = torch.randint(3, (8,))
    pipe.step(x, target=target)
    (executable,) = pipe._cache.latest.executables.values()
    executable._updated_buffers = lambda: pytest.fail("in every step")  # type: ignore[method-assign]
    pipe.step(x, target=target)
