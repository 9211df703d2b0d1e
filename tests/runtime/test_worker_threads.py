"""A thread per device gives the results of one thread, adopts the caller's state, and is idle again after an error."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from contextvars import ContextVar
from types import FrameType
from typing import Any

import pytest
import torch

import pipecompile as pc
from pipecompile.ir import LOSS
from pipecompile.runtime import worker_threads
from pipecompile.runtime.worker_threads import ThreadState, WorkerThreads
from tests.support.eager import square_loss
from tests.support.hand_cells import CPU, arrivals, executable, weights


def test_threads_and_one_thread_give_the_same_gradients() -> None:
    gradients = []
    for threaded in (False, True):
        first, last = weights()
        bound = executable(first, last, count=4)
        frame = bound.frame(
            (1,) * 4, arrivals(torch.randn(4, generator=torch.manual_seed(0)).chunk(4)), threaded=threaded
        )
        workers = WorkerThreads((CPU, CPU)) if threaded else None
        bound.run(bound.threaded if threaded else bound.inline, frame, workers)
        gradients.append((frame.departures[LOSS, False], first.grad, last.grad))
        assert len(frame.spans) == 16
    assert gradients[0] == gradients[1]


def test_after_an_error_the_threads_run_again() -> None:
    first, last = weights()
    bound, workers = executable(first, last), WorkerThreads((CPU, CPU))
    with pytest.raises(pc.RunError, match="stage 0 failed in forward of micro-batch 0"):
        bound.run(bound.threaded, bound.frame((1, 1), arrivals(["a", "b"]), threaded=True), workers)  # type: ignore[list-item]
    frame = bound.frame((1, 1), arrivals([torch.ones(1), torch.ones(1)]), threaded=True)
    bound.run(bound.threaded, frame, workers)
    assert first.grad == torch.tensor(3.0)


def test_a_step_within_a_step_is_refused_where_it_would_wait_for_itself() -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), torch.ones(4, 4)

    def nested(output: torch.Tensor) -> torch.Tensor:
        if not nests:
            nests.append(True)
            pipe.step(x)
        return output.sum()

    nests: list[bool] = [True]
    options: dict[str, Any] = {"devices": ["cpu"] * 2, "cost": "analytic", "n_microbatches": 2, "dispatch": "threads"}
    pipe = pc.compile(model, 2, example_args=(x,), loss_fn=nested, **options)
    pipe.step(x)
    nests.clear()
    with pytest.raises(pc.PipecompileError, match="a step within a step of the same pipeline"):
        pipe.step(x)
    pipe.step(x)


def test_the_state_of_the_caller_is_adopted_and_given_up() -> None:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        state = ThreadState.of_caller(1, (CPU,))
    assert torch.is_grad_enabled()
    with ExitStack() as stack:
        state.enter(stack)
        assert not torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_inference_mode_of_the_caller_is_adopted_and_given_up() -> None:
    with torch.inference_mode():
        state = ThreadState.of_caller(1, (CPU,))
    with ExitStack() as stack:
        state.enter(stack)
        assert torch.is_inference_mode_enabled()
        assert not torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()


def test_casts_are_cached_and_denormal_numbers_kept_as_in_the_callers_thread() -> None:
    """Workers cached casts under `autocast(cache_enabled=False)`, and kept denormal numbers that the caller flushes: the third step of
    "auto" gave other bits than the second.
    """

    class Small(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.shift = (torch.nn.Parameter(torch.ones(6)) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x * self.scale * 1e-38 * 1e-2) * self.shift

    x = torch.ones(4, 6)
    pipe = pc.compile(
        Small(), 2, loss_fn=lambda out: out.double().mean(), n_microbatches=2, cost="analytic", dispatch="threads"
    )
    try:
        for flushes in (False, True, False):
            torch.set_flush_denormal(flushes)
            assert (pipe.step(x) == 0) == flushes
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=flushes):
                state = ThreadState.of_caller(1, (CPU,))
            with ExitStack() as stack:
                state.enter(stack)
                assert torch.is_autocast_cache_enabled() == flushes
    finally:
        torch.set_flush_denormal(False)
        torch.set_autocast_cache_enabled(True)


def test_gradients_are_not_rounded_to_a_cached_cast() -> None:
    layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(2))

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                for _ in range(3):
                    x = torch.tanh(layer(x))
            return x.float()

    x, gradients = torch.randn(4, 6), []
    for dispatch in ("inline", "threads"):
        layers.zero_grad()
        pipe = pc.compile(Twice(), 2, loss_fn=square_loss, n_microbatches=2, cost="analytic", dispatch=dispatch)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            pipe.step(x)
        gradients.append([parameter.grad.clone() for parameter in layers.parameters()])
    assert all(map(torch.equal, *gradients))


def test_intra_op_threads_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    assert ThreadState.of_caller(2, (CPU, CPU)).threads == 2
    assert ThreadState.of_caller(8, (CPU,) * 8).threads == 1


class Interrupt:
    """A trace function that raises KeyboardInterrupt at the line of this number among those that the caller runs in a file."""

    def __init__(self, number: int) -> None:
        self.left, self.is_raised = number, False

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> Any:
        is_finalizer = frame.f_code.co_name == "_end"  # of other threads, whenever garbage is collected
        if frame.f_code.co_filename != worker_threads.__file__ or is_finalizer:
            return None
        if event == "line" and not self.is_raised:
            self.left -= 1
            if self.left < 0:
                self.is_raised = True
                raise KeyboardInterrupt
        return self


@pytest.mark.timeout(120)
def test_an_interrupt_at_any_line_leaves_threads_that_run_again() -> None:
    """Also twice: in the run, and while the threads are awaited."""
    first, last = weights()
    bound, workers = executable(first, last), WorkerThreads((CPU, CPU))

    def run() -> None:
        workers.run(bound.threaded, bound.frame((1, 1), arrivals([torch.ones(1), torch.ones(1)]), threaded=True))

    def interrupted(number: int) -> bool:
        trace = Interrupt(number)
        sys.settrace(trace)
        try:
            run()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        return trace.is_raised

    number = 0
    while interrupted(number):
        if number % 3:
            interrupted(number % 7)
        run()
        first.grad = last.grad = None
        run()
        assert first.grad == torch.tensor(3.0)
        number += 1
    assert number > 20


LABEL: ContextVar[str] = ContextVar("LABEL", default="none")


def test_context_variables_of_the_caller_are_seen() -> None:
    seen: list[str] = []
    first, last = weights()
    bound, workers = executable(first, last), WorkerThreads((CPU, CPU))
    first.register_hook(lambda gradient: seen.append(LABEL.get()) or gradient)
    LABEL.set("step")
    workers.run(bound.threaded, bound.frame((1, 1), arrivals([torch.ones(1), torch.ones(1)]), threaded=True))
    assert seen == ["step", "step"]
