"""Steps under schedules with several copies of each stage, beside the plain loop: models, options, and what follows a step."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipecompile as pc

M = 8


class Skips(nn.Module):
    """A value that skips stages, a tied weight, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 6)
        self.head.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x).tanh()
        b = self.middle(a).relu() + x
        return self.head(self.last(self.middle(b)) * a)


class Branches(nn.Module):
    """Towers that a head joins."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(2))
        self.head = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.left(x), self.right(x.cos())], 1))


class Remembers(nn.Module):
    """Leaves a number per forward, which a hook on the gradient reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.scale = float(x.detach().abs().max())
        made = self.first(x).tanh()
        if made.requires_grad:
            made.register_hook(lambda gradient: gradient * self.scale)
        return self.last(made.sin())


MODELS = [Skips, Branches, Remembers]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"checkpoint": "always"},
    {"checkpoint": "except_last"},
    {"dispatch": "threads"},
    {"compile_stages": False, "gradient_sums": "device"},
]


def _model(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def _batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(2 * M, 6, dtype=torch.float64), torch.randint(6, (2 * M,))


def _loop(model: nn.Module, x: Tensor, target: Tensor) -> float:
    total = 0.0
    for part, label in zip(x.chunk(M), target.chunk(M), strict=True):
        loss = F.cross_entropy(model(part), label) / M
        loss.backward()
        total += float(loss.detach())
    return total


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("schedule", "n_stages"), [("chimera", 2), ("chimera", 3), ("dualpipe", 2), ("dualpipe", 4)])
@pytest.mark.parametrize("kind", MODELS)
def test_steps_equal_the_plain_loop(
    kind: type[nn.Module], schedule: str, n_stages: int, options: dict[str, Any]
) -> None:
    model, other, (x, target) = _model(kind), _model(kind), _batch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pc.RecordingWarning)
        pipe = pc.compile(
            model, n_stages, example_args=(x,), n_microbatches=M, loss_fn=F.cross_entropy, schedule=schedule,
            cost="analytic", **options,
        )  # fmt: skip
        optimizers = [torch.optim.SGD(one.parameters(), 0.1, momentum=0.9) for one in (model, other)]
        for _ in range(3):
            loss = pipe.step(x, target=target)
            assert float(loss) == pytest.approx(_loop(other, x, target), rel=1e-12)
            for one, wanted in zip(model.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(one.grad, wanted.grad, rtol=1e-10, atol=1e-13)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        torch.testing.assert_close(pipe.eval()(x), other.eval()(x))
    assert pipe.schedule.directions


def test_statistics_are_those_of_the_loop_if_deferred() -> None:
    layers = lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6))  # noqa: E731
    (x, target), kinds = _batch(), ("1f1b", "chimera")
    found = []
    for kind in kinds:
        torch.manual_seed(0)
        model = layers().double()
        pipe = pc.compile(
            model, 2, example_args=(x,), n_microbatches=M, loss_fn=F.cross_entropy, schedule=kind, batch_norm="deferred", cost="analytic"
        )  # fmt: skip
        pipe.step(x, target=target)
        found.append([*model.buffers(), *(one.grad for one in model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_statistics_of_each_microbatch_come_in_the_order_of_the_schedule_with_a_warning() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6)).double()
    x, target = _batch()
    pipe = pc.compile(
        model, 2, example_args=(x,), n_microbatches=M, loss_fn=F.cross_entropy, schedule="chimera", batch_norm="each", cost="analytic"
    )  # fmt: skip
    with pytest.warns(pc.RecordingWarning, match="runs the forwards of micro-batches in the order"):
        pipe.step(x, target=target)


def test_its_program_runs_from_its_file(tmp_path: Path) -> None:
    model, other, (x, target) = _model(Skips), _model(Skips), _batch()
    keywords: dict[str, Any] = {
        "example_args": (x,),
        "n_microbatches": M,
        "loss_fn": F.cross_entropy,
        "cost": "analytic",
    }
    pipe = pc.compile(model, 2, schedule="chimera", **keywords)
    pipe.step(x, target=target)
    pipe.dump(tmp_path)
    for name in ("program.txt", "schedule.csv"):
        torch.manual_seed(0)
        again = _model(Skips)
        written = pc.compile(again, 2, schedule=tmp_path / name, plan=tmp_path / "plan.json", **keywords)
        written.step(x, target=target)
        assert written.schedule.directions == pipe.schedule.directions
        for one, wanted in zip(again.parameters(), model.parameters(), strict=True):
            assert torch.equal(one.grad, wanted.grad)
    _loop(other, x, target)
    for one, wanted in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, wanted.grad, rtol=1e-10, atol=1e-13)


def test_lists_of_microbatches_and_a_report(tmp_path: Path) -> None:
    model, other, (x, target) = _model(Skips), _model(Skips), _batch()
    pipe = pc.compile(
        model, 2, example_args=(x,), n_microbatches=M, loss_fn=F.cross_entropy, schedule="chimera", cost="analytic"
    )
    parts = [*zip(x.chunk(M), target.chunk(M), strict=True)]
    loss = pipe.step(microbatches=parts)
    assert float(loss) == pytest.approx(_loop(other, x, target), rel=1e-12)
    assert "chimera" in pipe.report(tmp_path / "report.html").read_text()
    predicted = pipe.simulate()
    assert predicted.makespan < pc.simulate(pc.build_schedule("1f1b", 2, M), **_seconds(pipe)).makespan


def _seconds(pipe: pc.Pipeline) -> dict[str, list[float]]:
    stages = pipe.plan.stages
    names = ("forward", "input_grad", "weight_grad", "backward")
    return {name: [getattr(stage, name) for stage in stages] for name in names}


def test_it_is_refused_on_a_limit_of_memory() -> None:
    with pytest.raises(pc.ScheduleError, match="2 copies of each stage, is given together with memory_limit"):
        pc.compile(_model(Skips), 2, n_microbatches=M, schedule="chimera", memory_limit=1e9)
