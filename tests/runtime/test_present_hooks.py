"""Hooks that were registered after the first step: "auto" runs in one thread again, and draws of backwards are warned of."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.runtime import dispatch
from pipecompile.runtime.present_hooks import PresentHooks
from tests.support.eager import accumulate, assert_same, square_loss


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))


def threaded(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> pc.Pipeline:
    """Return a pipeline of two stages that "auto" has given threads."""
    monkeypatch.setattr(dispatch, "THREAD_SECONDS", 0.0)
    monkeypatch.setattr(dispatch, "choose_dispatch", lambda *_: "threads")
    pipe = pc.compile(model, 2, loss_fn=square_loss, n_microbatches=4, cost="analytic")
    for _ in range(3):
        pipe.step(torch.randn(8, 6))
    assert pipe._dispatcher.is_threaded(is_ordered=False)
    model.zero_grad()
    return pipe


def passes_on(model: nn.Sequential) -> None:
    """Let the last layer read what the first one has left, a little later."""
    left: dict[str, torch.Tensor] = {}

    def scaled(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        time.sleep(0.002)
        return output * left["mean"]

    model[0].register_forward_hook(lambda _, __, output: left.update(mean=output.detach().mean()))
    model[3].register_forward_hook(scaled)


def test_hooks_of_layers_that_come_later_see_the_order_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference, x = layers(), layers(), torch.randn(8, 6)
    pipe = threaded(model, monkeypatch)
    passes_on(model)
    passes_on(reference)
    pipe.step(x)
    accumulate(reference, x, 4)
    assert_same(model, reference)


@pytest.mark.parametrize("place", [lambda m: m[0].weight.register_hook, lambda m: m[0].register_full_backward_hook])
def test_hooks_on_gradients_that_come_later_run_in_the_callers_thread(
    place: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    model, names = layers(), list[str]()
    pipe = threaded(model, monkeypatch)
    handle = place(model)(lambda *_: names.append(threading.current_thread().name))
    pipe.step(torch.randn(8, 6))
    handle.remove()
    assert set(names) == {threading.current_thread().name}


def test_draws_of_hooks_that_come_later_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    model = layers()
    pipe = threaded(model, monkeypatch)
    for layer in (model[0], model[3]):
        layer.weight.register_hook(lambda gradient: gradient + torch.randn_like(gradient))
    with pytest.warns(pc.RecordingWarning, match="random numbers are drawn in the backward of stages 0, 1"):
        pipe.step(torch.randn(8, 6))


def test_new_hooks_are_found_once_and_removed_ones_at_the_next_look() -> None:
    model = layers()
    hooks = PresentHooks([model], model.parameters())
    assert not hooks.look()
    assert not hooks
    handle = model[1].register_forward_pre_hook(lambda *_: None)
    assert hooks.look()
    assert hooks
    assert not hooks.look()
    handle.remove()
    other = model[2].weight.register_post_accumulate_grad_hook(lambda _: None)
    assert hooks.look()
    other.remove()
    nn.Linear(1, 1).register_forward_hook(lambda *_: None)
    assert not hooks.look()
    assert not hooks


def test_a_hook_of_all_modules_is_one_of_these() -> None:
    hooks = PresentHooks([layers()], ())
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        hooks.look()
        assert hooks
    finally:
        handle.remove()
