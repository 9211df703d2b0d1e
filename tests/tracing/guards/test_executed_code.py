"""State that code reads to which no name leads: each was a constant of the recording, without a word."""

from __future__ import annotations

import enum
import gc
import importlib
import operator
import sys
from functools import cached_property, partialmethod, singledispatch
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.tracing.guards.executed_code import ExecutedCode, functions_of

GAIN = 1.0


class Meta(type):
    def __getattr__(cls, name: str) -> float:
        if name == "gain":
            return GAIN
        raise AttributeError(name)


class WithMeta(metaclass=Meta):
    pass


class Number(int):
    def gain(self) -> float:
        return GAIN


class Pair(NamedTuple):
    first: float = 1.0

    def gain(self) -> float:
        return GAIN * self.first


class Mode(enum.Enum):
    TRAIN = 1

    def gain(self) -> float:
        return GAIN


class Lazy:
    times = partialmethod(lambda self, k: GAIN * k, 1.0)

    @cached_property
    def gain(self) -> float:
        return GAIN


class Proxy:
    def __init__(self, target: Any) -> None:
        object.__setattr__(self, "target", target)

    def __getattribute__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "target"), name)


class Target:
    gain = 1.0


def noted() -> float:
    return noted.gain


@singledispatch
def dispatched(_: Any) -> float:
    return GAIN


def factory(value: list[float]) -> Any:
    return lambda: value[0]


NUMBER, PAIR, PROXY = Number(1), Pair(), Proxy(Target)
ONE, TWO = factory([1.0]), factory([2.0])
TABLE = np.array([ONE, None], dtype=object)

READS = {
    "a metaclass": lambda: WithMeta.gain,
    "a subclass of int": lambda: NUMBER.gain(),
    "a named tuple": lambda: PAIR.gain(),
    "an enumeration": lambda: Mode.TRAIN.gain(),
    "a cached property": lambda: Lazy().gain,
    "a partial method": lambda: Lazy().times(),
    "a dispatched function": lambda: dispatched(1),
    "a method caller": lambda: operator.methodcaller("gain")(NUMBER),
    "an array of functions": lambda: TABLE[0](),
    "two functions of a factory": lambda: ONE() * TWO(),
    "an attribute of a function": lambda: noted(),
    "a proxy": lambda: PROXY.gain,
    "evaluated code": lambda: eval("GAIN * 1"),
    "globals": lambda: globals()["GAIN"],
    "the own module by name": lambda: sys.modules[__name__].GAIN,
    "a module by name": lambda: importlib.import_module("tests.tracing.guards.test_executed_code").GAIN,
}


class Scaled(nn.Module):
    def __init__(self, gain: Any) -> None:
        super().__init__()
        self.first, self.last, self.gain = nn.Linear(4, 4), nn.Linear(4, 4), gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) * self.gain())


def set_gain(value: float) -> None:
    global GAIN  # noqa: PLW0603 the state that the test is about
    GAIN = Target.gain = noted.gain = ONE.__closure__[0].cell_contents[0] = value


@pytest.mark.parametrize("kind", READS)
def test_what_executed_code_reads_is_guarded(kind: str) -> None:
    set_gain(1.0)
    torch.manual_seed(0)
    model, x = Scaled(READS[kind]), torch.randn(4, 4)
    pipe = pc.compile(model, 2, example_args=(x,), n_microbatches=2, cost="analytic", devices=["cpu"] * 2).eval()
    with torch.no_grad():
        for gain in (1.0, 2.0, 3.0):
            set_gain(gain)
            assert torch.equal(pipe(x), torch.cat([model(part) for part in x.chunk(2)]))
    set_gain(1.0)


def test_only_the_users_code_outside_calls_of_torch_is_noted() -> None:
    code = ExecutedCode()
    with code:
        noted()
        with code.off, code.off:
            dispatched(1)
        operator.add(1, 2)
    names = {one.co_name for one, _ in code.scopes.values()}
    assert "noted" in names
    assert "dispatched" not in names
    assert sys.getprofile() is None
    assert [*functions_of([noted.__code__])] == [noted]
    assert [*functions_of([])] == []


def test_another_profiler_is_left_in_place() -> None:
    def profiler(*_: object) -> None:
        return None

    before = sys.getprofile()
    sys.setprofile(profiler)
    try:
        code = ExecutedCode()
        with code:
            noted()
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(before)
    assert not code.scopes


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
