"""Stages through `torch.compile`, with a backend that needs no compiler: the numbers of stages that are run as they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from tests.support.eager import assert_same
from tests.test_pipeline import Net, batch

PLAIN = {"cost": "analytic", "devices": ["cpu"] * 2, "loss_fn": F.cross_entropy, "n_microbatches": 4}


class Gate(nn.Module):
    """Kept whole, since Python decides by a value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu() if x.mean() > 0 else x / 2


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.gate, self.b = nn.Linear(8, 8), nn.BatchNorm1d(8), Gate(), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.gate(self.norm(self.a(x))))


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # dynamo looks at it after a break
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("made", "options"),
    [
        (Net, {"schedule": "1f1b", "checkpoint": "always", "dispatch": "threads", "batch_norm": "each"}),
        (Gated, {"schedule": "gpipe", "checkpoint": "except_last", "batch_norm": "deferred"}),
    ],
)
def test_the_numbers_of_stages_as_they_are(made: type[nn.Module], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, (x, target) = made(), batch(9)
    plain = copy.deepcopy(model)
    compiled = pc.compile(model, 2, compile_stages="aot_eager", **PLAIN, **options)
    other = pc.compile(plain, 2, **PLAIN, **options)
    with torch.autocast("cpu", torch.bfloat16, enabled=made is Net):
        torch.testing.assert_close(compiled.step(x, target=target), other.step(x, target=target))
    assert_same(model, plain, 1e-2 if made is Net else 1e-5)
    if made is Gated:
        with torch.no_grad():
            torch.testing.assert_close(compiled.eval()(x), other.eval()(x))


class Counting:
    """A backend that counts the graphs that it gets."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Any:
        self.count += 1
        return graph.forward


def test_a_backward_that_is_split_stays_whole_and_a_warning_says_so() -> None:
    torch.manual_seed(0)
    model, (x, target) = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), batch()
    plain = copy.deepcopy(model)
    with pytest.warns(pc.RecordingWarning, match="all in I, W does nothing"):
        compiled = pc.compile(model, 2, compile_stages="aot_eager", schedule="zb-h1", **PLAIN)
    other = pc.compile(plain, 2, schedule="zb-h1", **PLAIN)
    for _ in range(2):
        torch.testing.assert_close(compiled.step(x, target=target), other.step(x, target=target))
    assert_same(model, plain, 1e-6)


def test_stages_are_compiled_once_for_all_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    counting, real = Counting(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: real(function, backend=counting))
    model, (x, target) = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), batch()
    pipe = pc.compile(model, 2, compile_stages=True, **PLAIN)
    for schedule in ("1f1b", "gpipe"):
        pipe.reschedule(schedule).step(x, target=target)
        pipe.step(x, target=target)
    assert counting.count == 2


def test_a_backend_that_is_not_known() -> None:
    with pytest.raises(
        pc.InputError, match=r"(?s)is not a backend.*known are.*inductor.*try .*compile_stages=\"inductor\""
    ):
        pc.compile(nn.Linear(2, 2), 1, compile_stages="inducto")
