"""Runs of single nodes: values, gradients, saved bytes, writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipecompile.costs.node_run import NodeRun, SavedLedger, map_tensors, tensors_in


def run_of(call: Callable[..., Any], *args: object) -> NodeRun:
    parameters = call.parameters() if isinstance(call, nn.Module) else ()
    return NodeRun(call, args, {}, parameters, SavedLedger(()))


def wanting(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def write(x: Tensor) -> None:
    x[:, 0] = 0


@pytest.mark.parametrize("call", [F.relu_, lambda x: x.mul_(2), write, lambda x: x.view(-1).add_(1)])
def test_a_write_reaches_the_value_and_its_views_once(call: Callable[..., Any]) -> None:
    value = wanting(3, 4)
    view, expected = value.detach().view(12), value.detach().clone()
    call(expected)
    run = run_of(call, value)
    run.first()
    for _ in range(3):
        run.prepare()
        run.forward()
        run.seed()
        assert run.has_backward
        run.backward()
    assert run.writes
    assert torch.equal(value.detach(), expected)
    assert torch.equal(view, expected.view(12))
    assert value.grad is None


def test_without_writes_arguments_are_not_copied() -> None:
    value, given = wanting(3, 4), []

    def double(x: Tensor) -> Tensor:
        given.append(x.data_ptr())
        return x * 2

    run = run_of(double, value)
    run.first()
    run.prepare()
    run.forward()
    assert not run.writes
    assert given == [value.data_ptr()] * 2


def test_backward_computes_the_gradients_of_arguments_and_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    real, gradients = torch.autograd.grad, list[Tensor]()
    monkeypatch.setattr(torch.autograd, "grad", lambda *args, **kwargs: gradients.extend(real(*args, **kwargs)))
    linear, x = nn.Linear(4, 2), wanting(3, 4)
    run = run_of(linear, x)
    run.first()
    run.seed()
    run.backward()
    linear(x).sum().backward()
    for gradient, expected in zip(gradients, (x.grad, linear.weight.grad, linear.bias.grad), strict=True):
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize(
    ("call", "value"),
    [
        (lambda x: x + 1, torch.ones(2)),  # nothing wants a gradient
        (lambda x: x.argmax(), wanting(3)),  # the result cannot have one
        (lambda x: x, wanting(3)),  # the argument itself
        (torch.no_grad()(lambda x: x * 2), wanting(3)),
    ],
)
def test_no_backward_where_there_is_none(call: Callable[..., Any], value: Tensor) -> None:
    run = run_of(call, value)
    run.first()
    run.seed()
    assert not run.has_backward
    run.backward()


def test_a_value_wants_a_gradient_after_one_that_does_was_written_into_it() -> None:
    target = torch.zeros(2, 2)
    run = run_of(lambda x, y: x.__setitem__(0, y), target, wanting(2))
    run.first()
    assert target.requires_grad
    assert target.is_leaf
    run.seed()
    assert run.has_backward


def test_a_node_computes_when_it_makes_or_changes_a_tensor() -> None:
    computes = {}
    calls: dict[str, Callable[..., Any]] = {"size": lambda x: x.size(0), "write": write, "make": torch.neg}
    for name, call in calls.items():
        run = run_of(call, torch.ones(2, 2))
        run.first()
        computes[name] = run.computes
    assert computes == {"size": False, "write": True, "make": True}


def test_the_value_is_outside_any_graph() -> None:
    run = run_of(lambda x: {"a": (x * 2, x.detach(), 3)}, wanting(2))
    run.first()
    double, plain, three = run.value["a"]
    assert (double.grad_fn, double.requires_grad, plain.requires_grad, three) == (None, True, False, 3)


def test_a_parameter_that_a_node_returns_is_still_a_parameter() -> None:
    run = run_of(lambda weight: weight.requires_grad_(True), nn.Parameter(torch.ones(2)))
    run.first()
    assert isinstance(run.value, nn.Parameter)
    NodeRun(lambda weight: weight.requires_grad_(False), [run.value], {}, (), SavedLedger(())).first()


def test_named_results_keep_their_names() -> None:
    run = run_of(lambda x: x.max(dim=0), wanting(2, 3))
    run.first()
    assert type(run.value) is torch.return_types.max  # fx's own map makes a plain tuple of it
    assert run.value.values.requires_grad


def test_tensors_are_found_in_every_structure() -> None:
    a, b = torch.ones(1), torch.ones(2)
    assert [id(t) for t in tensors_in((a, [slice(None, b)], {"x": a}, torch.ones(3).max(0).values.shape))] == [
        id(a),
        id(b),
    ]
    assert map_tensors(lambda t: t + 1, {"x": (slice(a, None), 2)}) == {"x": (slice(torch.tensor([2.0]), None), 2)}


def test_a_storage_is_counted_once_and_a_view_counts_all_of_it() -> None:
    ledger = SavedLedger(())
    x = torch.randn(10, 10, requires_grad=True)
    with ledger.recording():
        x[:5].exp().sin()
        x.cos()
    assert ledger.take() == 200 + 400  # exp saves its result, and sin the same storage again; cos saves x
    assert ledger.take() == 0


def test_free_tensors_count_nothing_whatever_view_is_saved() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    ledger = SavedLedger([weight])
    with ledger.recording():
        torch.randn(2, 4, requires_grad=True) @ weight.t()
    assert ledger.take() == 2 * 4 * 4


def test_a_new_storage_at_the_address_of_a_freed_one_is_counted() -> None:
    ledger = SavedLedger(())
    for _ in range(50):
        with ledger.recording():
            torch.randn(4, requires_grad=True).cos()
    assert ledger.take() == 50 * 16


def test_recording_leaves_the_gradient_right() -> None:
    x = torch.randn(3, requires_grad=True)
    with SavedLedger(()).recording():
        y = x.exp()
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, x.detach().exp())
