"""A model that the script changes between two steps: the pipeline computes what the changed model computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import changed_models
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from tests.support.eager import accumulate, square_loss


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.act, self.head = nn.Sequential(nn.Linear(4, 6), nn.Tanh()), F.relu, nn.Linear(6, 3)
        self.temperature, self.options, self.extra = 1.0, {"scale": [1.0]}, []

    def forward(self, x: torch.Tensor) -> Any:
        h = self.act(self.body(x)) / self.temperature * self.options["scale"][0]
        for layer in self.extra:
            h = layer(h)
        return self.head(h)


def piped(model: nn.Module, **options: Any) -> pc.Pipeline:
    options = {"loss_fn": square_loss, "cost": "analytic", "devices": ["cpu"] * 2, "n_microbatches": 2} | options
    return pc.compile(model, 2, **options)


def exact(pipe: pc.Pipeline, x: torch.Tensor) -> None:
    """A step and a call equal the loop over two micro-batches of the very model."""
    model = pipe.model
    model.zero_grad()
    loss, output = pipe.step(x), pipe(x)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    torch.testing.assert_close(loss, accumulate(model, x, 2))
    torch.testing.assert_close(gradients, {name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(output, torch.cat([model(part) for part in x.chunk(2)]))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "temperature": lambda net: setattr(net, "temperature", 0.5),
    "a new head": lambda net: setattr(net, "head", nn.Linear(6, 5)),
    "a new weight": lambda net: setattr(net.head, "weight", nn.Parameter(torch.ones(3, 6))),
    "frozen": lambda net: net.body.requires_grad_(False),
    "an item": lambda net: net.options["scale"].__setitem__(0, 3.0),
    "an activation": lambda net: setattr(net, "act", torch.sigmoid),
    "one more layer": lambda net: net.extra.append(nn.Linear(6, 6)),
    "a layer of a Sequential": lambda net: net.body.append(nn.Linear(6, 6)),
    "a hook of a container": lambda net: net.body.register_forward_hook(lambda *a: a[-1] * 2),
    "a forward": lambda net: setattr(net, "forward", lambda x: net.head(net.body(x))),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_steps_takes_part(name: str) -> None:
    torch.manual_seed(0)
    pipe, x = piped(Net()), torch.randn(6, 4)
    exact(pipe, x)
    CHANGES[name](pipe.model)
    exact(pipe, x)
    exact(pipe, x)
    assert pipe.explain().traces == 2


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda net: net.register_forward_hook(lambda _, __, output: output * 2),
    "forward, before": lambda net: net.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,)),
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_of_the_pipeline_takes_part_in_steps_as_in_calls(name: str) -> None:
    torch.manual_seed(0)
    pipe, x = piped(Net()), torch.randn(6, 4)
    exact(pipe, x)
    before = pipe.model.head.weight.grad.clone()
    handle = HOOKS[name](pipe)
    exact(pipe, x)
    assert not torch.allclose(before, pipe.model.head.weight.grad)
    handle.remove()
    exact(pipe, x)


def test_a_backward_hook_of_the_pipeline_is_refused_as_that_of_the_model_is() -> None:
    pipe, x = piped(Net()), torch.randn(6, 4)
    pipe.step(x)
    handle = pipe.register_full_backward_pre_hook(lambda _, gradients: (gradients[0] * 2,))
    with pytest.raises(pc.TraceError, match="the hook is on the whole model"):
        pipe.step(x)
    handle.remove()
    exact(pipe, x)


def test_a_change_that_comes_back_is_recorded_once() -> None:
    pipe, x = piped(Net()), torch.randn(4, 4)
    for frozen in (False, True) * 3:
        pipe.model.body.requires_grad_(not frozen)
        exact(pipe, x)
    assert pipe.explain().traces == 2


def test_the_report_names_what_changed_and_the_line_that_reads_it() -> None:
    pipe, x = piped(Net()), torch.randn(4, 4)
    pipe.step(x)
    pipe.model.temperature = 0.5
    pipe.step(x)
    first, second = reversed(pipe.explain().kept)
    line = Net.forward.__code__.co_firstlineno + 1
    assert first.changes == ()
    assert second.changes == (f"model.temperature: 1.0 -> 0.5, read at test_changed_models.py:{line} in Net.forward",)
    assert "recorded because" in str(pipe.explain())


def test_an_optimizer_trains_the_new_head() -> None:
    pipe, x = piped(Net()), torch.randn(4, 4)
    pipe.step(x)
    pipe.model.head = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    before = pipe.model.head.weight.detach().clone()
    pipe.zero_grad()
    pipe.step(x)
    optimizer.step()
    assert not torch.equal(before, pipe.model.head.weight)
    assert pipe.state_dict()["head.weight"].shape == (2, 6)
    assert len(pipe.explain().kept) == 1  # the recording with the old head, and so the old head, is dropped
    exact(pipe, x)


def test_steps_of_an_optimizer_and_running_statistics_are_no_change() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 4))
    pipe, x = piped(model, batch_norm="each"), torch.randn(8, 4)
    optimizer = torch.optim.Adam(pipe.parameters())
    for rate in (0.1, 0.2, 0.3):
        model[2].p = rate
        optimizer.zero_grad()
        pipe.step(x)
        optimizer.step()
    assert pipe.explain().traces == 1


SAMPLE = (
    "None becomes a tensor", "the attribute behind a property", "an attribute that getattr reads", "a slot", "an object with __getattr__",
    "a variable of a closure", "a context variable", "an environment variable",
    "a function of torch", "a plain tensor replaced", "weight_norm", "pruned",
)  # fmt: skip
"""Kinds of `benchmarks/changed_models.py`, one per way in which a change is seen."""


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_the_table(name: str) -> None:
    assert changed_models.outcome(name, "step", "train", None) in ("anew", "right")
