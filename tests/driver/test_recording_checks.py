"""The check of a new recording at its first run: when it runs, for which recordings, and what `explain` says of it."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor

import pipecompile as pc
from pipecompile.driver import recording_checks
from pipecompile.errors import InputError, MismatchError

COUNT = itertools.count(2)
"""State that no guard sees."""


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.scale, self.forwards = nn.Linear(4, 4), nn.Linear(4, 4), 1.0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x) * self.scale)


def compiled(model: nn.Module | None = None, **keywords: Any) -> pc.Pipeline:
    settings = {"loss_fn": lambda y: y.square().mean(), "n_microbatches": 2, "cost": "analytic"} | keywords
    return pc.compile(model or Scaled(), 2, devices=["cpu", "cpu"], **settings)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes, in samples, of the micro-batches that were checked."""
    sizes: list[int] = []
    verify = recording_checks.verify_recording

    def counted(graph: Any, call: Any) -> Any:
        sizes.append(call.inputs.samples)
        return verify(graph, call)

    monkeypatch.setattr(recording_checks, "verify_recording", counted)
    return sizes


def test_a_recording_is_checked_at_its_first_run_and_not_again(checks: list[int]) -> None:
    pipe = compiled(example_args=(torch.ones(6, 4),))
    assert checks == []
    assert pipe.explain().kept[0].checked == "not yet"
    pipe.step(torch.ones(6, 4))
    pipe.step(torch.ones(4, 4))
    pipe(torch.ones(6, 4))
    assert checks == [3]
    assert pipe.explain().kept[0].checked.endswith(" s")
    pipe.eval()
    with torch.no_grad():
        pipe(torch.ones(6, 4))
    assert checks == [3, 3]


def test_sizes_alone_are_checked_three_times(checks: list[int]) -> None:
    class Any1d(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(1, 4), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x.unsqueeze(-1)))

    pipe = compiled(Any1d())
    for length in range(2, 8):
        pipe.step(torch.ones(4, length))
    assert len(checks) == 4
    assert [row.checked for row in pipe.explain().kept[:2]] == ["no: sizes alone are new"] * 2


def test_every_n_mini_batches_again_and_never(checks: list[int]) -> None:
    model = Scaled()
    often, never = compiled(model, check="every:2"), compiled(model, check=False)
    for _ in range(5):
        often.step(torch.ones(4, 4))
        never.step(torch.ones(4, 4))
    assert len(checks) == 3
    assert never.explain().kept[0].checked == "no: check=False"
    with pytest.raises(InputError, match="every:N"):
        compiled(check="always")


def test_a_difference_is_an_error_each_time_and_no_gradient_is_left() -> None:
    class Counting(Scaled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x) * next(COUNT))

    model = Counting()
    pipe = compiled(model)
    for _ in range(2):
        with pytest.raises(MismatchError, match="the recording of Counting is not what the model computes") as caught:
            pipe.step(torch.ones(6, 4))
        assert "mul" in caught.value.where
        assert "Counting.forward" in caught.value.where
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_loss_is_that_of_the_step_with_its_target_and_its_auxiliary_value() -> None:
    targets: list[torch.Size] = []

    def loss_fn(y: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        targets.append(target.shape)
        return (y - target).square().mean(), y

    pipe = compiled(loss_fn=loss_fn, has_aux=True)
    pipe.step(torch.ones(6, 4), target=torch.zeros(6, 4))
    assert pipe.explain().kept[0].checked.endswith(" s")
    assert targets == [torch.Size([3, 4])] * 2, "the check leaves nothing in what the loss closes over"


def test_a_model_from_meta_is_not_checked(checks: list[int]) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = compiled(model, init="reset_parameters")
    pipe.step(torch.ones(4, 4))
    assert checks == []
    assert pipe.explain().kept[0].checked == "no: the model was on meta"


def test_a_check_without_gradients_does_not_stand_for_one_with_them(checks: list[int]) -> None:
    pipe = compiled(Scaled())
    for grad in (False, False, True, True, False):
        with torch.set_grad_enabled(grad):
            pipe.step(torch.ones(4, 4))
    assert len(checks) == 2


def test_a_difference_that_may_be_rounding_is_warned_of_once_and_the_step_goes_on() -> None:
    class OtherWhileRecorded(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = 2.0 if isinstance(x, FakeTensor) else 2.0 + 2**-17
            return self[1](self[0](x) * scale)

    pipe = compiled(OtherWhileRecorded(nn.Linear(4, 4), nn.Linear(4, 4)))
    with pytest.warns(pc.RecordingWarning, match="not give the bits of the model: output 0: differs by"):
        pipe.step(torch.ones(6, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.step(torch.ones(6, 4))
    assert pipe.explain().kept[0].checked.endswith(" s")
