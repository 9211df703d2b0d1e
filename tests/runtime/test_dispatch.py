"""Inline and threads run the same program to the same numbers; "auto" chooses by the time of a cell."""

from __future__ import annotations

import copy
import os
import signal
import time

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.runtime import dispatch
from pipecompile.runtime.dispatch import choose_dispatch
from tests.support.eager import accumulate, assert_same, square_loss

CPU = torch.device("cpu")


def test_auto_takes_threads_for_large_cells_on_idle_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert choose_dispatch(1e-2, (CPU, CPU)) == "threads"
    assert choose_dispatch(1e-5, (CPU, CPU)) == "inline"
    assert choose_dispatch(1e-2, (CPU,)) == "inline"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert choose_dispatch(1e-2, (CPU, CPU)) == "inline"


def test_auto_settles_at_the_second_step() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = pc.compile(model, 2, loss_fn=square_loss, cost="analytic", devices=["cpu"] * 2)
    assert pipe.dispatch == "auto"
    pipe.step(torch.randn(8, 4))
    assert pipe.dispatch == "auto", "the first step is slower than the rest"
    pipe.step(torch.randn(8, 4))
    assert pipe.dispatch == "inline"


class Leaves(nn.Module):
    """Kept whole, because it branches on a value; leaves what it made on itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 1e9:
            x = x + 1
        self.made = x
        return x


def _hooked() -> nn.Module:
    layer = nn.Tanh()
    layer.register_forward_hook(lambda module, _inputs, output: setattr(module, "made", output))
    return layer


@pytest.mark.parametrize(
    ("middle", "expected"),
    [(nn.Tanh, "threads"), (lambda: nn.Dropout(0.5), "inline"), (Leaves, "inline"), (_hooked, "inline")],
    ids=["plain", "draws", "kept whole", "hooked"],
)
def test_auto_stays_inline_where_the_order_of_cells_shows(monkeypatch: pytest.MonkeyPatch, middle, expected) -> None:
    monkeypatch.setattr(dispatch, "choose_dispatch", lambda *_: "threads")
    model = nn.Sequential(nn.Linear(4, 4), middle(), nn.Linear(4, 4))
    pipe = pc.compile(model, 2, loss_fn=square_loss, cost="analytic", devices=["cpu"] * 2, split_before=["2"])
    for _ in range(2):
        pipe.step(torch.randn(8, 4))
    assert pipe.dispatch == expected


def test_threads_that_were_chosen_end_where_a_later_recording_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "choose_dispatch", lambda *_: "threads")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4))
    eager, x = copy.deepcopy(model), torch.randn(8, 4)
    pipe = pc.compile(
        model, 3, loss_fn=square_loss, cost="analytic", devices=["cpu"] * 3, split_before=["2", "4"], n_microbatches=4
    )
    for _ in range(3):
        pipe.step(x)
    assert pipe.dispatch == "threads"
    for one in (model, eager):
        one.zero_grad()
        one[1], one[3] = nn.Dropout(0.5), nn.Dropout(0.5)
    torch.manual_seed(1)
    loss = pipe.step(x)
    torch.manual_seed(1)
    assert torch.equal(loss, accumulate(eager, x, 4))
    assert_same(model, eager)


class Ambient(nn.Module):
    """Notes what its thread sees."""

    seen: list[tuple[bool, bool, torch.dtype]] = []

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(Noting.apply(self.a(x)))


class Noting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, torch._subclasses.FakeTensor):
            Ambient.seen.append((torch.is_autocast_enabled("cpu"), torch.get_num_threads() == 1, x.dtype))
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def test_workers_take_over_autocast_and_share_the_cores() -> None:
    pipe = pc.compile(Ambient(), 2, loss_fn=square_loss, cost="analytic", dispatch="threads", devices=["cpu"] * 2)
    Ambient.seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        pipe.step(torch.randn(8, 4))
    assert set(Ambient.seen) == {(True, True, torch.bfloat16)}
    Ambient.seen.clear()
    pipe.step(torch.randn(8, 4))
    assert set(Ambient.seen) == {(False, True, torch.float32)}


def test_a_forked_process_has_threads_of_its_own() -> None:
    """It waited for ever for those of the process that it was forked from, before."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x = torch.randn(4, 4)
    pipe = pc.compile(model, 2, devices=["cpu"] * 2, example_args=(x,), loss_fn=torch.mean, cost="analytic", dispatch="threads")  # fmt: skip
    with torch.no_grad():
        expected = pipe.step(x).item()
    if not (child := os.fork()):
        with torch.no_grad():
            os._exit(int(pipe.step(x).item() != expected))
    end = time.monotonic() + 30
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0)


def test_modes_and_hooks_of_the_callers_thread_reach_all_stages() -> None:
    """Threads of their own had none: `save_on_cpu`, a mode that counts or changes calls was ignored, silently."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    eager, x = copy.deepcopy(model), torch.randn(4, 4)
    pipe = pc.compile(
        model, 2, devices=["cpu"] * 2, n_microbatches=2, loss_fn=torch.sum, cost="analytic", dispatch="threads"
    )
    pipe.step(x)
    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
        pipe.step(x)
        accumulate(eager, x, 2, torch.sum)
    assert_same(model, eager)
    assert pipe.dispatch == "threads"
