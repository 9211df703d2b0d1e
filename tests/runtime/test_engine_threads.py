"""Backwards on threads of the engine, as GPUs have them: steps, calls, hooks, and errors are as on the calling thread."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipecompile as pc
from tests.support.emulated import EmulatedExecutable
from tests.support.engine_threads import engine_threads
from tests.support.stepped import SteppedStreams


class Cubed(torch.autograd.Function):
    """A function of a user; its backward may fail."""

    fails = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if Cubed.fails:
            raise RuntimeError("no gradient today")
        (x,) = ctx.saved_tensors
        with torch.enable_grad():  # a backward within the backward
            y = x.detach().requires_grad_()
            return torch.autograd.grad((y**3).sum(), y)[0] * gradient


class Blocks(nn.Module):
    """Four linear layers with a normalisation, a function of the user, and a skip over all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        first = h = self.norm(self.layers[0](x))
        for layer in list(self.layers)[1:]:
            h = Cubed.apply(layer(h).tanh())
        return h + first


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def pipeline(model: nn.Module, x: Tensor, **options: Any) -> pc.Pipeline:
    return pc.compile(
        model, 4, example_args=(x,), loss_fn=loss_of, n_microbatches=4, devices=["cpu"] * 4, cost="analytic",
        batch_norm="each", **options,
    )  # fmt: skip


def trained(pipe: pc.Pipeline, x: Tensor) -> list[Tensor]:
    """Return the loss of a step, what all parameters have as gradients, and the buffers."""
    pipe.model.zero_grad()
    loss = pipe.step(x)
    return [loss, *(p.grad.clone() for p in pipe.model.parameters()), *(b.clone() for b in pipe.model.buffers())]


def called(pipe: pc.Pipeline, x: Tensor) -> list[Tensor]:
    pipe.model.zero_grad()
    x = x.clone().requires_grad_()
    loss = loss_of(pipe(x))
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad.clone() for p in pipe.model.parameters())]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("run", [trained, called])
@pytest.mark.parametrize(
    "options", [{"checkpoint": "never"}, {"checkpoint": "always"}, {"schedule": "zb-h1"}, {"offload": True}]
)
@pytest.mark.parametrize("dispatch", ["inline", "threads"])
def test_gradients_are_those_of_the_calling_thread(run, options, dispatch):
    model, x = Blocks(), torch.randn(8, 8)
    pipes = [pipeline(copy.deepcopy(model), x, dispatch=dispatch, **options) for _ in range(2)]
    expected = [run(pipes[0], x) for _ in range(2)]
    with engine_threads() as used:
        found = [run(pipes[1], x) for _ in range(2)]
    assert used
    assert threading.get_ident() not in used
    for one, other in zip(expected, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("choice", ["inline", "threads"])
@pytest.mark.parametrize("options", [{}, {"schedule": "zbv"}, {"offload": True}])
def test_emulated_devices_with_threads_of_the_engine_are_equal(choice, options):
    model, x = Blocks(), torch.randn(8, 8)
    options = {**options, "devices": ["cpu"] * 2} if options.get("schedule") == "zbv" else options
    pipe = pc.compile(
        model, 4, example_args=(x,), loss_fn=loss_of, n_microbatches=4, cost="analytic", batch_norm="each",
        **{"devices": ["cpu"] * 4, **options},
    )  # fmt: skip
    expected = trained(pipe, x)[: 1 + len(list(model.parameters()))]
    streams = SteppedStreams()
    EmulatedExecutable(pipe, 4, streams=streams)
    pipe._dispatcher.choice = choice
    with engine_threads() as used:
        for seed in range(20):
            streams.reseed(seed)
            found = trained(pipe, x)[: len(expected)]
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), seed
    assert used


def test_hooks_run_on_the_threads_of_the_engine_and_count():
    model, x = Blocks(), torch.randn(8, 8)
    eager, threads, sums = copy.deepcopy(model), set[int](), list[float]()

    def scale(gradient: Tensor) -> Tensor:
        threads.add(threading.get_ident())
        return gradient * 2

    for one in (model, eager):
        one.layers[2].weight.register_hook(scale)
        one.layers[1].bias.register_post_accumulate_grad_hook(lambda p: sums.append(float(p.grad.sum())))
    pipe = pipeline(model, x)
    with engine_threads() as used:
        pipe.step(x)
    assert threads & used
    for part in x.chunk(4):
        (loss_of(eager(part)) / 4).backward()
    for own, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)
    assert sums


def test_an_error_on_a_thread_of_the_engine_names_the_stage_and_leaves_the_pipeline_usable(monkeypatch):
    model, x = Blocks(), torch.randn(8, 8)
    pipe = pipeline(model, x)
    expected = trained(pipe, x)[0]
    with engine_threads():
        monkeypatch.setattr(Cubed, "fails", True)
        with pytest.raises(pc.RunError, match=r"(?s)no gradient today.*test_engine_threads\.py"):
            pipe.step(x)
        monkeypatch.setattr(Cubed, "fails", False)
        assert torch.equal(trained(pipe, x)[0], expected)


def test_autocast_holds_on_the_threads_of_the_engine():
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), torch.randn(8, 8)
    pipes = [pipeline(copy.deepcopy(model), x) for _ in range(2)]

    def under_autocast(pipe: pc.Pipeline) -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return trained(pipe, x)

    expected = under_autocast(pipes[0])
    with engine_threads():
        found = under_autocast(pipes[1])
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
