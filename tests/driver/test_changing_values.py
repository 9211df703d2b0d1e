"""A number that a script changes before every step: read at every run from the second change on, or its piece kept whole."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.driver.changing_values import ChangingValues
from pipecompile.driver.warnings_once import WarningsOnce
from pipecompile.tracing.guards.state_guards import ReadChange
from tests.support.compilations import options_of
from tests.support.eager import accumulate, square_loss

SCALE = 1.0


class Block(nn.Module):
    factor = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.repeats, self.options = nn.Linear(6, 6), 1, {"weights": [0.5]}

    def forward(self, h: torch.Tensor) -> Any:
        for _ in range(self.repeats):
            h = torch.tanh(self.layer(h))
        return h * self.options["weights"][0] + self.factor * SCALE


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(4, 6), Block(), nn.Linear(6, 3)
        self.temperature, self.epoch, self.rounds = 1.0, 0, 1

    def forward(self, x: torch.Tensor) -> Any:
        h = self.first(x) / self.temperature
        if self.epoch > 5:
            h = h * 2
        for _ in range(self.rounds):
            h = h + 1
        return self.last(self.block(h) * min(1.0, self.epoch / 10))


def _set_scale(_model: Any, step: int) -> None:
    globals()["SCALE"] = 0.1 * step + 0.1


CHANGES: dict[str, tuple[Callable[[Any, int], Any], int]] = {
    "an attribute": (lambda model, step: setattr(model, "temperature", 1 / (step + 1)), 3),
    "an attribute that is compared": (lambda model, step: setattr(model, "epoch", step), 4),
    "a number of rounds in a submodule": (lambda model, step: setattr(model.block, "repeats", step + 1), 3),
    "an item": (lambda model, step: model.block.options["weights"].__setitem__(0, 0.1 * step), 3),
    "a new dictionary": (lambda model, step: setattr(model.block, "options", {"weights": [0.1 * step]}), 3),
    "an attribute of a class": (lambda _model, step: setattr(Block, "factor", 0.3 * step), 3),
    "a global": (_set_scale, 3),
}
"""Per kind: the change before each step, and the recordings that seven steps need."""


def piped(model: nn.Module, **options: Any) -> pc.Pipeline:
    options = {"loss_fn": square_loss, "cost": "analytic", "devices": ["cpu"] * 2, "n_microbatches": 2} | options
    return pc.compile(model, 2, **options)


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setitem(globals(), "SCALE", 1.0)
    monkeypatch.setattr(Block, "factor", 2.0)


def exact(pipe: pc.Pipeline, x: torch.Tensor) -> None:
    """A step and a call equal the loop over two micro-batches of the very model."""
    model = pipe.model
    model.zero_grad()
    loss, output = pipe.step(x), pipe(x)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    torch.testing.assert_close(loss, accumulate(model, x, 2))
    torch.testing.assert_close(gradients, {name: p.grad for name, p in model.named_parameters()})
    assert torch.equal(output, torch.cat([model(part) for part in x.chunk(2)]))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", [{}, {"checkpoint": "always"}, {"dispatch": "threads"}], ids=str)
@pytest.mark.parametrize("kind", CHANGES)
def test_a_number_that_changes_before_every_step_is_recorded_three_times(kind: str, options: dict[str, Any]) -> None:
    change, recordings = CHANGES[kind]
    pipe, x = piped(Net(), **options), torch.randn(7, 4)  # uneven micro-batches
    for step in range(7):
        change(pipe.model, step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exact(pipe, x)
    assert pipe.explain().traces == recordings


def test_the_report_names_what_is_read_at_every_run_and_what_was_compared() -> None:
    pipe, x = piped(Net()), torch.randn(4, 4)
    for step in range(4):
        pipe.model.epoch = step
        pipe.step(x)
    latest = pipe.explain().kept[0]
    assert latest.read == ("model.epoch",)
    assert any(guard.startswith("model.epoch > 5: False (test_changing_values.py:") for guard in latest.guards)
    assert "model.epoch is read at every run" in latest.because


def changed(pipe: pc.Pipeline, x: torch.Tensor, change: Callable[[Any, int], Any]) -> list[str]:
    """Run five steps with a change before each, and return the warnings about changes."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        for step in range(5):
            change(pipe.model, step)
            exact(pipe, x)
    return [str(one.message) for one in given if "changes between steps" in str(one.message)]


def test_a_piece_that_needs_the_number_is_kept_whole_with_one_warning() -> None:
    pipe, x = piped(Net()), torch.randn(4, 4)
    (text,) = changed(pipe, x, lambda model, step: setattr(model.block, "repeats", step + 1))
    assert "model.block.repeats, read at" in text
    assert "in Block.forward, changes between steps: block is kept whole" in text
    assert pipe.explain().kept[0].kept == ("block",)


def test_a_number_that_the_root_needs_is_recorded_anew_with_one_warning() -> None:
    def change(model: Any, step: int) -> None:
        model.rounds, model.temperature = step + 1, 0.9**step

    pipe, x = piped(Net()), torch.randn(4, 4)
    (text,) = changed(pipe, x, change)
    assert text.startswith("model.rounds, read at")
    assert "the model is recorded anew at every change" in text
    assert pipe.explain().kept[0].read == ("model.temperature",)


def test_a_captured_stage_contains_its_numbers() -> None:
    pipe, x = piped(Net(), compile_stages="eager"), torch.randn(4, 4)
    (text,) = changed(pipe, x, lambda model, step: setattr(model, "temperature", 0.9**step))
    assert "a captured or compiled stage contains it" in text


def test_the_number_of_another_type_is_recorded_anew() -> None:
    pipe, x = piped(Net()), torch.randn(4, 4)
    for value in (1.0, 0.5, 0.25, 2, 3, torch.tensor(0.5), 0.1):
        pipe.model.temperature = value
        exact(pipe, x)


def test_a_recomputation_reads_the_number_of_its_forward() -> None:
    pipe, x = piped(Net(), checkpoint="always"), torch.randn(4, 4)
    for step in range(4):
        pipe.model.temperature = 1 / (step + 1)
        exact(pipe, x)
    model = pipe.model
    model.zero_grad()
    first = pipe(x)
    model.temperature = 7.0
    second = pipe(x)
    model.temperature = 9.0
    square_loss(first + second).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    outputs = []
    for model.temperature in (0.25, 7.0):
        outputs.append(torch.cat([model(part) for part in x.chunk(2)]))
    square_loss(outputs[0] + outputs[1]).backward()
    torch.testing.assert_close(gradients, {name: p.grad for name, p in model.named_parameters()})
    assert pipe.explain().traces == 3


def test_training_and_evaluation_read_the_same_number() -> None:
    pipe, x = piped(Net()), torch.randn(4, 4)
    for step in range(5):
        pipe.model.temperature = 1 / (step + 1)
        pipe.train(step % 2 == 0)
        exact(pipe, x)
    assert {one.read for one in pipe.explain().kept} >= {("model.temperature",)}


def test_parameters_that_are_frozen_and_thawed_are_not_advised_to_be_buffers() -> None:
    """The warning told of register_buffer, before."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    pipe = pc.compile(
        model, 2, devices=["cpu"] * 2, loss_fn=square_loss, n_microbatches=2, cost="analytic", cache_size=1
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(7):
            model[0].weight.requires_grad_(step % 2 == 0)
            pipe.step(torch.randn(4, 4))
    texts = [str(one.message) for one in caught if "requires_grad" in str(one.message)]
    assert any("Freeze parameters before compile, or seldom" in text for text in texts)
    assert not any("register_buffer" in text for text in texts)


def test_changes_whose_recording_failed_are_counted_once() -> None:
    changing = ChangingValues(nn.Linear(2, 2), WarningsOnce())
    changes = [ReadChange("model.factor", 1.0, 2.0, "")]
    for _ in range(3):
        changing.note(changes, options_of())
        changing.forget(changes)
    assert changing.counts["model.factor"] == 0
