"""Hooks on gradients of parameters that several backwards of a micro-batch reach run as in a loop over micro-batches."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

import pipecompile as pc

Log = list[Any]
Hook = Callable[[nn.Module, Log], Any]


class Tied(nn.Module):
    """Its first layer is also its last one; the loss reads the weight of the middle one."""

    def __init__(self) -> None:
        super().__init__()
        self.ends, self.a, self.b = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ends(torch.tanh(self.b(torch.tanh(self.a(torch.tanh(self.ends(x)))))))


def _penalised(model: Tied) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda y: y.square().mean() + model.a.weight.square().sum()


def _normalise(model: Any, log: Log) -> None:
    for own in (model.ends.weight, model.a.weight):
        own.register_hook(lambda g: (log.append(g.norm()), g / g.norm())[1])


def _clip(model: Any, log: Log) -> None:
    def clip(own: torch.Tensor) -> None:
        assert own.grad is not None
        log.append(own.grad.norm())
        own.grad.clamp_(-1e-2, 1e-2)

    for own in (model.ends.weight, model.a.weight):
        own.register_post_accumulate_grad_hook(clip)


def _note_once(model: Any, log: Log) -> None:
    def note(gradient: torch.Tensor) -> None:
        log.append(gradient.norm())
        handle.remove()

    handle = model.ends.weight.register_hook(note)


def _note_all(model: Any, log: Log) -> None:
    register_multi_grad_hook(list(model.parameters()), lambda all_: log.extend(each.norm() for each in all_))


def _note_any(model: Any, log: Log) -> None:
    register_multi_grad_hook(list(model.parameters()), lambda _: log.append(torch.ones(())), mode="any")


def _read_within(model: Any, log: Log) -> None:
    weight = model.ends.weight

    def note(gradient: torch.Tensor) -> None:
        with torch.enable_grad():
            inner = torch.autograd.grad(weight.square().sum(), weight)[0]
        log.append((inner * gradient).sum())

    model.ends.bias.register_hook(note)
    weight.register_post_accumulate_grad_hook(lambda own: log.append(own.grad.norm()))


def _compare(hook: Hook, schedule: str, **options: Any) -> None:
    torch.manual_seed(0)
    model, logs = Tied(), (Log(), Log())
    eager = copy.deepcopy(model)
    pipe = pc.compile(
        model,
        2,
        n_microbatches=3,
        schedule=schedule,
        loss_fn=_penalised(model),
        cost="analytic",
        check=False,
        **options,
    )
    for each, log in ((model, logs[0]), (eager, logs[1])):
        hook(each, log)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x in torch.randn(2, 8, 4):
            pipe.step(x)
            for part in x.split((3, 3, 2)):
                (_penalised(eager)(eager(part)) * len(part) / 8).backward()
    torch.testing.assert_close([one.grad for one in model.parameters()], [one.grad for one in eager.parameters()])
    _assert_same(*logs)
    assert not any(
        type(one).__name__ == "_HeldHook" for own in model.parameters() for one in (own._backward_hooks or {}).values()
    )


def _assert_same(got: Log, expected: Log) -> None:
    """Compare what hooks noted. The order of hooks of unlike parameters is that of the schedule."""
    torch.testing.assert_close(torch.stack(got).sort().values, torch.stack(expected).sort().values)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("hook", [_normalise, _clip, _note_once, _note_all, _note_any, _read_within])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_hooks_get_the_gradient_of_a_micro_batch_once(hook: Hook, schedule: str) -> None:
    """They ran once per stage: the gradient of a weight whose hook normalises was wrong, silently."""
    _compare(hook, schedule)


@pytest.mark.parametrize("hook", [_normalise, _note_all])
def test_hooks_in_threads_where_w_runs_apart(hook: Hook) -> None:
    _compare(hook, "zb-h1", dispatch="threads")


def test_hooks_under_recomputation() -> None:
    _compare(_normalise, "gpipe", checkpoint="always")


def test_sparse_and_dense_parts_are_added() -> None:
    torch.manual_seed(0)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.a = nn.Embedding(5, 5, sparse=True), nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.a(torch.tanh(self.table(x)))) @ self.table.weight

    model, logs = Both(), (Log(), Log())
    eager = copy.deepcopy(model)
    pipe = pc.compile(model, 2, n_microbatches=2, loss_fn=lambda y: y.square().mean(), cost="analytic", check=False)
    for each, log in ((model, logs[0]), (eager, logs[1])):
        each.table.weight.register_post_accumulate_grad_hook(lambda own, log=log: log.append(own.grad.norm()))  # type: ignore[misc]
    x = torch.randint(0, 5, (4,))
    pipe.step(x)
    for part in x.split(2):
        (eager(part).square().mean() / 2).backward()
    _assert_same(*logs)


def test_a_hook_that_fails_leaves_hooks_and_gradients_as_they_were() -> None:
    model = Tied()
    pipe = pc.compile(model, 2, n_microbatches=2, loss_fn=lambda y: y.square().mean(), cost="analytic", check=False)
    failing = [True]

    def fail(gradient: torch.Tensor) -> torch.Tensor:
        if failing[0]:
            raise ValueError("no")
        return gradient

    model.ends.weight.register_hook(fail)
    with pytest.raises(pc.RunError, match="no") as _kept:
        pipe.step(torch.randn(4, 4))
    assert model.ends.weight.grad is None
    assert list((model.ends.weight._backward_hooks or {}).values()) == [fail]
    failing[0] = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.step(torch.randn(4, 4))


def test_hooks_on_the_node_of_a_shared_weight_are_warned_of() -> None:
    """They cannot be held: each stage runs them."""
    model = Tied()
    pipe = pc.compile(model, 2, n_microbatches=2, loss_fn=lambda y: y.square().mean(), cost="analytic", check=False)
    node = model.ends.weight.view_as(model.ends.weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_hook(lambda *_: None)
    with pytest.warns(pc.RecordingWarning, match=r"hooks on the gradient of ends\.weight run once per stage"):
        pipe.step(torch.randn(4, 4))
