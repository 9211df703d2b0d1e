"""Flags and settings of the process that a forward reads through functions of torch: a change records the model anew."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import get_num_threads as threads_in_use
from torch import nn
from torch.backends import cudnn

from pipecompile.tracing.guards.process_state import returns_state
from tests.support.recorded_reads import guards_of


class Net(nn.Module):
    def __init__(self, read: Callable[[], Any]) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(2, 2), read

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x) * (2.0 if self.read() else 3.0)


def imported_in_the_function() -> Any:
    from torch.backends import cudnn as own  # the subject

    return own.deterministic


def environment_in_the_function() -> Any:
    import os as own  # the subject

    return own.environ.get("PIPECOMPILE_TEST_FLAG")


def _determinism() -> None:
    torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled())


def _flip(holder: Any, name: str) -> Callable[[], None]:
    return lambda: setattr(holder, name, not getattr(holder, name))


READS: dict[str, tuple[Callable[[], Any], Callable[[], None]]] = {
    "threads": (lambda: torch.get_num_threads() > 1, lambda: torch.set_num_threads(3 - torch.get_num_threads())),
    "threads by name": (lambda: threads_in_use() > 1, lambda: torch.set_num_threads(3 - torch.get_num_threads())),
    "determinism": (torch.are_deterministic_algorithms_enabled, _determinism),
    "precision": (
        lambda: torch.get_float32_matmul_precision() == "high",
        lambda: torch.set_float32_matmul_precision("high"),
    ),
    "seed": (lambda: torch.initial_seed() % 2, lambda: void(torch.manual_seed(torch.initial_seed() + 1))),
    "cudnn": (lambda: torch.backends.cudnn.benchmark, _flip(torch.backends.cudnn, "benchmark")),
    "cudnn by name": (lambda: cudnn.benchmark, _flip(torch.backends.cudnn, "benchmark")),
    "flash": (
        lambda: torch.backends.cuda.flash_sdp_enabled(),
        lambda: torch.backends.cuda.enable_flash_sdp(not torch.backends.cuda.flash_sdp_enabled()),
    ),
    "import": (imported_in_the_function, _flip(torch.backends.cudnn, "deterministic")),
    "environment": (
        environment_in_the_function,
        lambda: os.environ.__setitem__("PIPECOMPILE_TEST_FLAG", "1"),
    ),
}


def void(_value: object) -> None:
    pass


@pytest.fixture(autouse=True)
def _process_restored() -> Iterator[None]:
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        stack.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
        stack.callback(setattr, torch.backends.cudnn, "deterministic", torch.backends.cudnn.deterministic)
        stack.callback(torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.flash_sdp_enabled())
        stack.callback(os.environ.pop, "PIPECOMPILE_TEST_FLAG", None)
        yield


@pytest.mark.parametrize("name", READS)
def test_a_setting_of_the_process_that_a_forward_reads_is_guarded(name: str) -> None:
    read, change = READS[name]
    torch.set_num_threads(1)
    guards = guards_of(Net(read), torch.zeros(3, 2))
    assert guards.hold()
    change()
    assert not guards.hold()
    assert guards.changes()


def test_settings_that_no_code_reads_do_not_count() -> None:
    guards = guards_of(Net(bool), torch.zeros(3, 2))
    for _, change in READS.values():
        change()
    assert guards.hold()


@pytest.mark.parametrize("function", [torch.is_grad_enabled, torch.compiler.is_compiling, torch.rand, len, os.getpid])
def test_other_functions_return_no_state(function: Callable[..., Any]) -> None:
    assert not returns_state(function)
