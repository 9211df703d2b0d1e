"""State that code reads to which no name leads: each was a constant of the recording, without a word."""

from __future__ import annotations

import cProfile
import gc
import importlib
import logging
import operator
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.tracing.guards.executed_code import ExecutedCode, functions_of

KINDS = [
    "a metaclass",
    "a subclass of int",
    "a named tuple",
    "an enumeration",
    "a cached property",
    "a partial method",
    "a dispatched function",
    "a method caller",
    "an array of functions",
    "two functions of a factory",
    "an attribute of a function",
    "a proxy",
    "evaluated code",
    "globals",
    "the own module by name",
    "a module by name",
]


class Scaled(nn.Module):
    def __init__(self, gain: Any) -> None:
        super().__init__()
        self.first, self.last, self.gain = nn.Linear(4, 4), nn.Linear(4, 4), gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) * self.gain())


@pytest.fixture(scope="module")
def reads() -> Iterator[ModuleType]:
    """Import the module, and leave all older objects out of each search of the memory for functions: it is large in a long run."""
    gc.collect()
    gc.freeze()
    try:
        yield importlib.import_module("tests.tracing.guards.executed_reads")
    finally:
        gc.unfreeze()
        del sys.modules["tests.tracing.guards.executed_reads"]  # the next import is a new one


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
def test_what_executed_code_reads_is_guarded(kind: str, reads: ModuleType) -> None:
    assert [*reads.READS] == KINDS
    reads.set_gain(1.0)
    torch.manual_seed(0)
    model, x = Scaled(reads.READS[kind]), torch.randn(4, 4)
    pipe = pc.compile(model, 2, example_args=(x,), n_microbatches=2, cost="analytic", devices=["cpu"] * 2).eval()
    with torch.no_grad():
        for gain in (1.0, 2.0, 3.0):
            reads.set_gain(gain)
            assert torch.equal(pipe(x), torch.cat([model(part) for part in x.chunk(2)]))
    reads.set_gain(1.0)


def test_functions_that_a_script_has_frozen_are_guarded(reads: ModuleType) -> None:
    """`gc.get_referrers` does not see frozen objects, and a function in an array of objects has no name that leads to it."""
    gc.freeze()
    test_what_executed_code_reads_is_guarded("an array of functions", reads)


def test_only_the_users_code_outside_calls_of_torch_is_noted() -> None:
    def noted() -> None:
        return None

    def left_out() -> None:
        return None

    code = ExecutedCode()
    with code:
        noted()
        with code.off, code.off:
            left_out()
        operator.add(1, 2)
    names = {one.co_name for one, _ in code.scopes.values()}
    assert "noted" in names
    assert "left_out" not in names
    assert sys.getprofile() is None
    assert [*functions_of([(noted.__code__, globals())])] == [noted]
    assert [*functions_of([])] == []


def found_by_name() -> None:
    return None


class Named:
    @staticmethod
    def method() -> None:
        return None


def test_the_memory_is_not_looked_through_for_a_function_that_its_name_leads_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gc, "get_referrers", None)
    ran = [(one.__code__, globals()) for one in (Named.method, Counted.forward, found_by_name)]
    assert [*functions_of(ran)] == [Named.method, Counted.forward, found_by_name]


def called() -> None:
    return None


def ignored(*_: object) -> None:
    return None


@pytest.fixture
def _hooks() -> Iterator[None]:
    profiler, tracer = sys.getprofile(), sys.gettrace()
    yield
    sys.setprofile(profiler)
    sys.settrace(tracer)


@pytest.mark.usefixtures("_hooks")
def test_under_a_profiler_calls_are_noted_by_the_trace_function() -> None:
    sys.settrace(None)
    sys.setprofile(ignored)
    code = ExecutedCode()
    with code:
        called()
        logging.getLogger(__name__).warning("handlers of messages compute nothing of the model")
        found_by_name()
    assert sys.getprofile() is ignored
    assert sys.gettrace() is None
    assert {called.__code__, found_by_name.__code__} <= {one for one, _ in code.scopes.values()}
    assert logging.Handler.handle.__code__ not in {one for one, _ in code.scopes.values()}


@pytest.mark.usefixtures("_hooks")
def test_under_a_profiler_and_a_debugger_a_warning_says_that_nothing_is_noted() -> None:
    sys.setprofile(ignored)
    sys.settrace(ignored)
    code = ExecutedCode()
    with pytest.warns(pc.RecordingWarning, match="a profiler and a debugger are active"), code, code.off:
        called()
    assert sys.getprofile() is ignored
    assert sys.gettrace() is ignored
    assert not code.scopes


def test_a_step_in_cprofile_notices_what_it_notices_otherwise(reads: ModuleType) -> None:
    with cProfile.Profile():
        test_what_executed_code_reads_is_guarded("evaluated code", reads)


CALLS = [0]


class Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        CALLS[0] += 1
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Finalized:
    """An object in a cycle: only a collection frees it, at any time."""

    def __init__(self) -> None:
        self.own = self

    def __del__(self) -> None:
        CALLS[0] += 1


class Collects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(50):
            Finalized()
        return Counted.apply(self.layer(x))


def test_code_that_runs_again_in_each_run_or_by_chance_is_not_noted() -> None:
    """Counters of an autograd function, and of objects that the collector frees, had the model recorded at each step."""
    thresholds = gc.get_threshold()
    gc.set_threshold(10, 1, 1)
    try:
        pipe = pc.compile(Collects(), 1, n_microbatches=2, cost="analytic", devices=["cpu"],
                          loss_fn=lambda y: y.square().mean())  # fmt: skip
        for _ in range(4):
            pipe.step(torch.randn(4, 4))
    finally:
        gc.set_threshold(*thresholds)
    assert pipe.explain().traces == 1
    assert gc.isenabled()
