"""Calls of one pipeline by several threads: they take turns, and calls within a call do not wait."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from multiprocessing import get_context
from time import sleep

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.driver.call_lock import CallLock
from tests.support.eager import square_loss


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def compiled(model: nn.Module, **options: object) -> pc.Pipeline:
    options = {"loss_fn": square_loss, "cost": "analytic", "devices": ["cpu"] * 2, "n_microbatches": 2} | options
    return pc.compile(model, 2, **options)


def test_another_thread_waits_and_a_call_within_a_call_passes() -> None:
    lock = CallLock()
    token = lock.enter()
    assert token is not None
    assert lock.enter() is None
    with ThreadPoolExecutor(2) as pool:
        assert pool.submit(copy_context().run, lock.enter).result(timeout=60) is None  # a worker within the call
        waiting = pool.submit(lambda: lock.leave(lock.enter()))
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.1)
        lock.leave(None)
        lock.leave(token)
        waiting.result(timeout=60)


def test_a_process_that_is_forked_while_a_thread_is_inside_does_not_wait_for_it() -> None:
    """The thread does not exist in the child: it waited for ever, before."""
    lock = CallLock()
    with ThreadPoolExecutor(1) as pool:
        token = pool.submit(lock.enter).result()
        child = get_context("fork").Process(target=lock.enter)
        child.start()
        child.join(60)
        code = child.exitcode
        child.kill()
        assert (code, token is not None) == (0, True)


def test_first_calls_of_several_threads_give_what_the_model_gives() -> None:
    """Recordings swap the insides of the model's tensors: other threads would run on tensors without values."""
    model = network()
    pipe, inputs = compiled(model), [torch.randn(8, 4) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        outputs = [*pool.map(pipe, inputs)]
        losses = [*pool.map(pipe.step, inputs)]
    for x, output, loss in zip(inputs, outputs, losses, strict=True):
        torch.testing.assert_close(output, model(x))
        torch.testing.assert_close(loss, square_loss(model(x)).detach())
    assert pipe.explain().traces == 1


def test_a_step_of_another_thread_waits_for_the_end_of_an_evaluation() -> None:
    """The step ran in eval mode, without dropout, if the evaluation was between two of its batches."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.9), nn.Linear(6, 3))
    modes, pipe, x = list[bool](), compiled(model), torch.ones(8, 4)
    pipe.step(x)
    model[0].register_forward_hook(lambda *_: modes.append(model.training))
    steps = []
    with ThreadPoolExecutor(1) as pool:

        def batches() -> Iterator[tuple[torch.Tensor]]:
            yield (x,)
            steps.append(pool.submit(pipe.step, x))
            sleep(0.1)
            yield (x,)

        pipe.evaluate([{"input": x}])
        pipe.step(x)
        modes.clear()
        pipe.evaluate({"input": x} for (x,) in batches())
        steps[0].result()
    assert modes == [*[False] * (len(modes) - 2), True, True]
    assert len(modes) >= 4


@pytest.mark.parametrize("dispatch", ["inline", "threads"])
def test_a_loss_calls_the_pipeline_itself(dispatch: str) -> None:
    model, inner, due = network(), [], []

    def loss(output: torch.Tensor) -> torch.Tensor:
        if due:
            with torch.no_grad():
                inner.append(due.pop()(other))
        return square_loss(output)

    pipe, x, other = compiled(model, loss_fn=loss, dispatch=dispatch), torch.randn(8, 4), torch.randn(4, 4)
    expected = pipe.step(x)
    due.append(pipe)
    torch.testing.assert_close(pipe.step(x), expected)
    torch.testing.assert_close(inner[0], model(other).detach())
