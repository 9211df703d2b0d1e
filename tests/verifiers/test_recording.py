"""The verifier of recordings: it compares a recording with the model, leaves nothing behind, and names the line that differs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.batching.call_inputs import flatten
from pipecompile.errors import MismatchError
from pipecompile.torch_private.modes import FakeTensor
from pipecompile.verifiers.eager_run import CheckedCall
from pipecompile.verifiers.recording import verify_recording

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Scaled(nn.Module):
    """Two layers, and between them a function of the case."""

    def __init__(self, between: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.between, self.scale, self.calls = between, 2.0, 0
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        return self.b(self.between(self, self.norm(self.a(x))))


def verify(model: nn.Module, graph: Any = None, *, loss: bool = True, x: torch.Tensor = X) -> str:
    inputs = flatten(model.forward, (x,), {})
    loss_of = (lambda y: y.square().mean()) if loss else (lambda _: None)
    call = CheckedCall(model, inputs, torch.device("cpu"), torch.is_grad_enabled(), loss_of)
    verdict = verify_recording(graph or pc.trace(model, X), call)
    return verdict.obstacle or verdict.doubt


def scaled(model: Any, h: torch.Tensor) -> torch.Tensor:
    return h * model.scale


def drawn(model: Any, h: torch.Tensor) -> torch.Tensor:
    return h if random.random() > 0.5 else h * model.scale


def dropped(model: Any, h: torch.Tensor) -> torch.Tensor:
    model.calls += 1
    model.total += 1
    return nn.functional.dropout(h, 0.5)


def refusing(model: Any, h: torch.Tensor) -> torch.Tensor:
    if model.scale == 3:
        raise ValueError("scale is too large")
    return h


@pytest.mark.smoke
@pytest.mark.parametrize("loss", [True, False])
def test_a_right_recording_passes_with_and_without_a_loss_and_gradients(loss: bool) -> None:
    for between in (scaled, dropped):
        assert verify(Scaled(between), loss=loss) == ""
        with torch.no_grad():
            assert verify(Scaled(between), loss=loss) == ""


def test_nothing_is_left_of_the_runs() -> None:
    model = Scaled(dropped)
    model.a.weight.grad = torch.ones(4, 4)
    graph = pc.trace(model, X)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    versions = [tensor._version for tensor in model.parameters()]
    draws = torch.get_rng_state(), random.getstate()
    x = X.clone().requires_grad_()
    verify(model, graph, x=x)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [tensor._version for tensor in model.parameters()] == versions
    assert (model.calls, model.a.weight.grad.sum(), model.b.weight.grad, x.grad) == (0, 16, None, None)
    assert torch.equal(draws[0], torch.get_rng_state())
    assert draws[1] == random.getstate()


def test_hooks_that_get_gradients_of_parameters_do_not_run_and_stay_registered() -> None:
    model, gradients = Scaled(scaled), []
    for register in (model.a.bias.register_hook, model.a.bias.register_post_accumulate_grad_hook):
        register(lambda _: gradients.append(1))
    verify(model)
    assert gradients == []
    model(X).sum().backward()
    assert gradients == [1, 1]


def test_a_value_that_became_a_constant_is_named_with_its_line() -> None:
    model = Scaled(scaled)
    graph = pc.trace(model, X)
    model.scale = 3.0
    with pytest.raises(MismatchError, match="output 0: differs by") as caught:
        verify(model, graph)
    assert "mul" in caught.value.where
    assert "test_recording.py" in caught.value.where
    assert "in scaled" in caught.value.where


def test_gradients_alone_may_differ() -> None:
    model = Scaled(lambda model, h: h if model.scale == 2 else h.detach())
    graph = pc.trace(model, X)
    model.scale = 3.0
    with pytest.raises(MismatchError, match=r"gradient of a\.weight"):
        verify(model, graph)
    with torch.no_grad():
        assert verify(model, graph) == ""


def test_a_buffer_that_is_written_otherwise_differs() -> None:
    model = Scaled(lambda model, h: h if model.scale == 2 else h + 0 * model.total.add_(1))
    graph = pc.trace(model, X)
    model.scale = 3.0
    with pytest.raises(MismatchError, match="buffer total"):
        verify(model, graph)


def test_a_draw_that_the_recording_does_not_make_differs_whatever_it_gives() -> None:
    model = Scaled(dropped)
    graph = pc.trace(model, X)
    model.between = lambda model, h: nn.functional.dropout(torch.rand(()) * 0 + h, 0.5)
    with pytest.raises(MismatchError):
        verify(model, graph)


def test_an_exception_of_the_model_alone_is_a_difference_one_of_both_is_not() -> None:
    model = Scaled(refusing)
    graph = pc.trace(model, X)
    model.scale = 3.0
    with pytest.raises(MismatchError, match="raises ValueError on this mini-batch") as caught:
        verify(model, graph)
    assert "scale is too large" in str(caught.value)
    assert "in refusing" in caught.value.where
    assert verify(Scaled(scaled), pc.trace(Scaled(scaled), X), x=torch.ones(1, 4)) == "a micro-batch raises ValueError"


def reseeded(model: Any, h: torch.Tensor) -> torch.Tensor:
    torch.seed()
    return h * (model.scale + torch.rand_like(h) / 10)


def test_a_model_that_does_not_repeat_its_own_numbers_passes() -> None:
    model = Scaled(reseeded)
    graph = pc.trace(model, X)
    assert verify(model, graph, loss=False) == ""
    model.scale = 1e6
    with pytest.raises(MismatchError, match="differs by"):
        verify(model, graph, loss=False)


def test_a_difference_beside_a_parameter_without_a_gradient_is_found() -> None:
    torch.manual_seed(0)
    model = Scaled(lambda model, h: (h * model.scale).detach())
    graph = pc.trace(model, X)
    model.b.bias.requires_grad_(False)
    model.scale = 2.5
    with pytest.raises(MismatchError, match="differs by"):
        verify(model, graph)


def test_not_a_number_equals_itself() -> None:
    assert verify(Scaled(lambda _, h: h / 0 - h / 0)) == ""


def test_a_difference_that_roundings_explain_is_named_and_a_larger_one_is_an_error() -> None:
    torch.manual_seed(0)
    model = Scaled(scaled)
    graph = pc.trace(model, X)
    for small in (2**-22, 2**-17):
        model.scale = 2.0 + small
        assert "differs by" in verify(model, graph)
    model.scale = 2.0 + 2**-8
    with pytest.raises(MismatchError, match="differs by"):
        verify(model, graph)


def test_one_rounding_of_half_precision_is_a_warning_too() -> None:
    torch.manual_seed(0)
    model, x = Scaled(scaled).bfloat16(), X.bfloat16()
    graph = pc.trace(model, x)
    assert verify(model, graph, x=x) == ""
    model.scale = 2.0 + 2**-6
    assert "differs by" in verify(model, graph, x=x)
    model.scale = 2.5
    with pytest.raises(MismatchError, match="differs by"):
        verify(model, graph, x=x)


def test_with_several_threads_a_few_roundings_pass() -> None:
    torch.manual_seed(0)
    model = Scaled(scaled)
    graph = pc.trace(model, X)
    torch.set_num_threads(2)
    try:
        model.scale = 2.0 + 2**-22
        assert verify(model, graph) == ""
        model.scale = 2.0 + 2**-15
        assert "differs by" in verify(model, graph)
    finally:
        torch.set_num_threads(1)


class Noticing(nn.Module):
    """Takes another way while it is traced, as the attention masks of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * 2 if isinstance(x, FakeTensor) else x)


class Masked(nn.Module):
    """Makes a mask under fake tensors alone, which its layer cannot take."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = torch.full((1,), 9) if isinstance(x, FakeTensor) else torch.arange(3)
        return self.layer(x).index_select(1, at)


def test_a_recording_that_raises_where_the_model_noticed_it_names_the_line_that_noticed() -> None:
    pipe = pc.compile(Masked(), 1, example_args=(torch.randn(4, 4),), loss_fn=torch.mean, cost="analytic")
    with pytest.raises(MismatchError, match=r"(?s)the model does not: .*test_recording.py:\d+ in Masked.forward"):
        pipe.step(torch.randn(4, 4))


def test_a_model_that_notices_its_recording_is_refused_with_the_line_that_noticed() -> None:
    pipe = pc.compile(Noticing(), 1, example_args=(torch.randn(4, 4),), loss_fn=torch.sum, cost="analytic")
    with pytest.raises(
        MismatchError, match=r"notices that it is recorded \(test_recording.py:\d+ in Noticing.forward\)"
    ):
        pipe.step(torch.randn(4, 4))
