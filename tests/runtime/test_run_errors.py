"""A stage that fails: one error, that says where; no thread hangs; the next step is right."""

from __future__ import annotations

import copy
import gc
import inspect
import random
import threading
import time
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor

import pipecompile as pc
from pipecompile.driver.programs import step_executable
from pipecompile.runtime import watchdog
from pipecompile.runtime.interpreter import Code
from tests.support.eager import accumulate, assert_same, square_loss

pytestmark = pytest.mark.smoke


class Bomb(torch.autograd.Function):
    """Identity that fails on the micro-batch that holds the value 13, on the way there or on the way back."""

    armed = ""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        ctx.hot = not isinstance(x, FakeTensor) and bool((x == 13).any())  # type: ignore[attr-defined]
        if Bomb.armed == "forward" and ctx.hot:  # type: ignore[attr-defined]
            raise ZeroDivisionError("boom")
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        if Bomb.armed == "backward" and ctx.hot:  # type: ignore[attr-defined]
            raise ZeroDivisionError("boom")
        return gradient


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mark = x
        for layer in self.layers[:2]:
            x = layer(x)
        x = x + Bomb.apply(mark) * 0  # the line that fails
        for layer in self.layers[2:]:
            x = layer(x)
        return x


def piped(model: nn.Module, dispatch: str, **options: object) -> pc.Pipeline:
    return pc.compile(
        model, 4, example_args=(torch.randn(8, 4),), n_microbatches=4, loss_fn=square_loss, cost="analytic",
        devices=["cpu"] * 4, dispatch=dispatch, **options,  # type: ignore[arg-type]
    )  # fmt: skip


def hot_batch() -> torch.Tensor:
    x = torch.randn(8, 4)
    x[5] = 13  # micro-batch 2
    return x


@pytest.mark.parametrize("dispatch", ["inline", "threads"])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_one_error_that_says_where_and_the_next_step_is_right(
    dispatch: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net()
    eager = copy.deepcopy(model)
    pipe = piped(model, dispatch)
    x = hot_batch().requires_grad_()
    monkeypatch.setattr(Bomb, "armed", when)
    with pytest.raises(pc.RunError) as caught:
        pipe.step(x)
    error = caught.value
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert error.microbatch == 2
    assert f"stage {error.stage} failed in {when} of micro-batch 2: ZeroDivisionError: boom" in str(error)
    failing, text = (Net, "the line that fails") if when == "forward" else (Bomb.backward, 'ZeroDivisionError("boom")')
    lines, start = inspect.getsourcelines(failing)
    line = start + next(i for i, source in enumerate(lines) if text in source)
    assert f"test_run_errors.py:{line}" in str(error)
    monkeypatch.setattr(Bomb, "armed", "")
    model.zero_grad()
    x.grad = None
    loss = pipe.step(x)
    torch.testing.assert_close(loss, accumulate(eager, x.detach(), 4), rtol=0, atol=0)
    assert_same(model, eager)


def test_threads_persist_and_end_with_the_pipeline() -> None:
    before = set(threading.enumerate())  # threads of pipelines that are gone may still end meanwhile
    pipe = piped(Net(), "threads")
    pipe.step(torch.randn(8, 4))
    workers = set(threading.enumerate()) - before
    assert len(workers) == 4
    pipe.step(torch.randn(8, 4))
    assert set(threading.enumerate()) - before == workers
    del pipe
    gc.collect()
    for worker in workers:
        worker.join(timeout=10)
    assert not any(worker.is_alive() for worker in workers)


@pytest.mark.parametrize("dispatch", ["inline", "threads"])
def test_nothing_of_a_failed_step_stays_alive(dispatch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error was in a circle with frames of its traceback, and kept the batch until the next garbage collection."""
    pipe = piped(Net(), dispatch)
    monkeypatch.setattr(Bomb, "armed", "forward")
    x = hot_batch()
    trace = weakref.ref(x)
    gc.disable()
    try:
        with pytest.raises(pc.RunError):
            pipe.step(x)
        del x
        assert trace() is None
    finally:
        gc.enable()


def test_a_keyboard_interrupt_stays_one() -> None:
    class Stop(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    def interrupted(_: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    for dispatch in ("inline", "threads"):
        pipe = piped(Net(), dispatch)
        loss_fn = pipe._options.loss_fn
        object.__setattr__(pipe._options, "loss_fn", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pipe.step(torch.randn(8, 4))
        object.__setattr__(pipe._options, "loss_fn", loss_fn)


@pytest.mark.parametrize("dispatch", ["inline", "threads"])
def test_faults_at_random_instructions(dispatch: str) -> None:
    """Whatever fails, there is one error that names it, everything is idle again, and the next step is right."""
    chance = random.Random(0)
    for schedule, checkpoint in (("1f1b", "never"), ("zb-h1", "except_last"), ("gpipe", "always")):
        torch.manual_seed(0)
        model, x = Net(), torch.randn(8, 4)
        eager = copy.deepcopy(model)
        loss = accumulate(eager, x, 4)
        before = set(threading.enumerate())  # threads of pipelines that are gone may still end meanwhile
        pipe = piped(model, dispatch, schedule=schedule, checkpoint=checkpoint)
        pipe.step(x)
        executable = step_executable(pipe._cache.latest, 4, with_target=False)
        name = "inline" if dispatch == "inline" else "threaded"
        sound = getattr(executable, name)
        workers = set(threading.enumerate()) - before
        for _ in range(8):
            device, index = chance.choice(sound.order)
            executable.__dict__[name] = harmed(sound, device, index)
            with pytest.raises(pc.RunError) as caught:
                pipe.step(x)
            instruction = sound.program.rows[device][index]
            value = (*instruction.reads, *instruction.writes)[0].value
            assert caught.value.microbatch == (instruction.action or value).microbatch
            assert caught.value.stage == (instruction.action.stage if instruction.action else None)
            assert isinstance(caught.value.__cause__, MemoryError)
            executable.__dict__[name] = sound
            model.zero_grad()
            torch.testing.assert_close(pipe.step(x), loss, rtol=1e-6, atol=0)
            assert_same(model, eager, 0.0 if dispatch == "inline" else 1e-6)
            assert set(threading.enumerate()) - before == workers


def harmed(code: Code, device: int, index: int) -> Code:
    """The same code, one instruction out of memory."""

    def fail(frame: object) -> None:
        raise MemoryError("no memory")

    rows = [list(row) for row in code.rows]
    rows[device][index] = fail
    flat = tuple(fail if place == (device, index) else run for place, run in zip(code.order, code.flat, strict=True))
    return replace(code, rows=tuple(map(tuple, rows)), flat=flat)


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, FakeTensor):
            time.sleep(0.3)
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Sleeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(Slow.apply(self.a(x)))


def test_a_step_that_stands_still_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = pc.compile(
        Sleeps(), 2, example_args=(torch.randn(2, 4),), n_microbatches=1, loss_fn=square_loss, cost="analytic",
        devices=["cpu"] * 2, dispatch="threads",
    )  # fmt: skip
    monkeypatch.setattr(watchdog, "PATIENCE", 0.1)
    with pytest.warns(
        RuntimeWarning, match=r"stood still for 0.1 s: device 0 at (0F0|SEND|RECV).*device 1 at (1F0|RECV)"
    ):
        pipe.step(torch.randn(2, 4))


class Short(torch.autograd.Function):
    """Identity whose backward finds no memory while `armed`."""

    error: Exception | None = None

    @staticmethod
    def forward(_ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        if Short.error is not None:
            raise Short.error
        return gradient


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:3]:
            x = layer(x).relu()
        return self.layers[3](Short.apply(x))


def held_bytes() -> int:
    gc.collect()
    tensors = [one for one in gc.get_objects() if type(one) is torch.Tensor]
    return sum(
        {
            one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
            for one in tensors
            if one.layout is torch.strided
        }.values()
    )


def failed(pipe: pc.Pipeline, x: torch.Tensor, error: Exception, monkeypatch: pytest.MonkeyPatch) -> pc.RunError:
    monkeypatch.setattr(Short, "error", error)
    with pytest.raises(pc.RunError) as caught:
        pipe.step(x)
    monkeypatch.setattr(Short, "error", None)
    return caught.value


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dispatch", ["inline", "threads"])
def test_an_error_keeps_no_activations(dispatch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the traceback kept the frame of the step, and the frame every activation: 16 MiB here, beside what one cell holds."""
    x = torch.randn(8192, 64)
    pipe = pc.compile(
        Tower(), 4, n_microbatches=8, loss_fn=square_loss, cost="analytic", schedule="gpipe", dispatch=dispatch, devices=["cpu"] * 4
    )  # fmt: skip
    pipe.step(x)
    pipe.model.zero_grad()
    before = held_bytes()
    error = failed(pipe, x, ZeroDivisionError(), monkeypatch)
    assert held_bytes() - before < 2 * x.nbytes
    assert error.stage == 3
    pipe.step(x)


def test_an_error_for_lack_of_memory_names_the_predicted_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = pc.compile(Tower(), 4, n_microbatches=8, loss_fn=square_loss, cost="analytic", devices=["cpu"] * 4)
    x = torch.randn(8192, 64)
    pipe.step(x)
    text = str(failed(pipe, x, torch.OutOfMemoryError("no more"), monkeypatch))
    states = sum(p.nbytes for p in pipe.model.layers[3].parameters())
    assert step_executable(pipe._cache.latest, 8, False).peaks()[3] > pipe.simulate().peak_memory[3] + states  # type: ignore[misc]
    assert "pipeline device 3 is out of memory; the predicted peak is " in text
    assert "MiB" in text
    assert 'checkpoint="always"' in text


def test_a_late_error_of_a_gpu_says_that_its_place_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = pc.compile(Tower(), 4, n_microbatches=8, loss_fn=square_loss, cost="analytic", devices=["cpu"] * 4)
    x = torch.randn(16, 64)
    pipe.step(x)
    text = str(failed(pipe, x, RuntimeError("CUDA error: device-side assert"), monkeypatch))
    assert "an earlier action of any stage on it may have caused this one" in text
    assert "CUDA_LAUNCH_BLOCKING=1" in text


class TwoOutputs(nn.Module):
    """Computes the second output from the first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.tanh(self.a(x))
        return h, self.c(torch.tanh(self.b(h)))


def test_a_gradient_between_outputs_of_two_stages_says_what_to_try() -> None:
    """It was autograd's own message, which advises `allow_unused=True`: a penalty of zero."""

    def penalty(outputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return (
            torch.autograd.grad(outputs[1].sum(), outputs[0], create_graph=True)[0].square().mean() + outputs[1].mean()
        )

    pipe = pc.compile(TwoOutputs(), 2, n_microbatches=2, loss_fn=penalty, cost="analytic", check=False)
    with pytest.raises(pc.RunError, match="an autograd graph of its own") as told:
        pipe.step(torch.randn(4, 4))
    assert "a single stage" in told.value.hint


def test_batch_norm_in_a_loss_on_one_sample_says_how_many_micro_batches() -> None:
    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def forward(self, output: torch.Tensor) -> torch.Tensor:
            return self.norm(output).square().mean()

    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    pipe = pc.compile(model, 2, n_microbatches=4, loss_fn=Normalised(), cost="analytic", devices=["cpu"] * 2)
    with pytest.raises(pc.RunError, match=r"try    fewer micro-batches \(n_microbatches=\): BatchNorm in the loss"):
        pipe.step(torch.randn(4, 3))
