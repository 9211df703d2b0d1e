"""Code that reads the global GAIN, or what stands for it, in ways to which no name of a model leads."""

from __future__ import annotations

import enum
import importlib
import operator
import sys
from collections.abc import Callable
from functools import cached_property, partialmethod, singledispatch
from typing import Any, NamedTuple

import numpy as np

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

READS: dict[str, Callable[[], float]] = {
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
    "a module by name": lambda: importlib.import_module("tests.tracing.guards.executed_reads").GAIN,
}


def set_gain(value: float) -> None:
    global GAIN  # noqa: PLW0603 the state that the test is about
    GAIN = Target.gain = noted.gain = ONE.__closure__[0].cell_contents[0] = value
