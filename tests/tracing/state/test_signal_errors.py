"""Errors of signal handlers are not taken for errors of the calls that they interrupt."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipecompile as pc
from pipecompile.errors import RunError
from pipecompile.tracing.state.signal_errors import is_from_handler, signal_errors_kept


class TooSlow(Exception):
    pass


@pytest.fixture(autouse=True)
def handler() -> Iterator[Any]:
    def too_slow(number: int, frame: Any) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGUSR1, too_slow)
    yield too_slow
    assert signal.getsignal(signal.SIGUSR1) is too_slow
    signal.signal(signal.SIGUSR1, before)


def test_what_a_handler_raises_is_raised_behind_the_block_that_drops_it() -> None:
    with pytest.raises(TooSlow), signal_errors_kept(), suppress(Exception):
        signal.raise_signal(signal.SIGUSR1)
    with signal_errors_kept(), suppress(Exception):
        raise ValueError


@pytest.mark.filterwarnings("ignore:the loss was not recognised")
@pytest.mark.parametrize("at", range(5))
def test_a_step_raises_it_in_whichever_call_of_the_loss_it_comes(at: int, tmp_path: Path) -> None:
    calls = tmp_path / "calls"  # a file, since calls that only measure leave objects as they were

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with calls.open("a") as file:
            count = file.write("x") and file.tell()
        if count == at + 1:
            signal.raise_signal(signal.SIGUSR1)
        return mse_loss(output, target)

    layers = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    pipe = pc.compile(layers, 2, devices=["cpu"] * 2, n_microbatches=2, loss_fn=loss, cost="analytic")
    with pytest.raises((TooSlow, RunError)) as told:
        pipe.step(torch.randn(4, 2), target=torch.randn(4, 2))
    assert isinstance(told.value, TooSlow) or isinstance(told.value.__cause__, TooSlow)


def _caught(call: object) -> BaseException:
    with pytest.raises(RuntimeError) as caught:
        call()  # type: ignore[operator]
    error = caught.value
    error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
    return error


def _raise() -> None:
    raise RuntimeError("of a handler")


def _wait() -> None:
    exec(compile("def wait(): raise RuntimeError('connection reset')", "c10d", "exec"), space := {"__name__": "torch.distributed.c"})  # fmt: skip
    space["wait"]()


def _loader() -> None:
    exec(compile("def handler(): raise RuntimeError('killed')", "loader", "exec"), space := {"__name__": "torch.utils.data.s"})  # fmt: skip
    space["handler"]()


@pytest.mark.parametrize(("call", "expected"), [(_raise, True), (_loader, True), (_wait, False)])
def test_the_innermost_python_code_decides(call: object, expected: bool) -> None:
    assert is_from_handler(_caught(call)) == expected


def test_an_exception_without_a_traceback_is_of_the_call() -> None:
    assert not is_from_handler(RuntimeError())
