"""The functions that a call leads to, and the objects that it has at hand."""

from __future__ import annotations

from functools import partial

from torch import nn

from pipecompile.tracing.called_functions import CalledFunctions


class Store:
    def __init__(self) -> None:
        self.inner = Inner()

    @property
    def level(self) -> float:
        return _halved(self.inner.read())

    def unused(self) -> None:
        raise AssertionError


class Inner:
    def __init__(self) -> None:
        self.rows: list[float] = [1.0]

    def read(self) -> float:
        return self.rows[-1]


def _halved(value: float) -> float:
    return value / 2


STORE = Store()


def _names(calls: CalledFunctions) -> set[str]:
    return {one.__qualname__ for one in calls.functions}


def test_globals_properties_methods_and_functions_are_followed() -> None:
    def hook(_layer, _inputs, output):
        return output * STORE.level

    calls = CalledFunctions([hook])
    assert {"Store.level", "Inner.read", "_halved"} <= _names(calls)
    assert "Store.unused" not in _names(calls)
    assert any(one is STORE.inner.rows for one in calls.containers)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Sequential(Child())

    def forward(self, x):
        return self.child(x)

    def other(self, x):
        return x


class Child(nn.Module):
    def forward(self, x):
        return x + 1


def test_the_forwards_of_children_that_are_named_are_followed() -> None:
    layer = Layer()
    assert _names(CalledFunctions([layer.forward])) == {"Layer.forward", "Child.forward"}
    assert _names(CalledFunctions([layer.other])) == {"Layer.other"}


def test_what_a_partial_binds_is_at_hand() -> None:
    store = Store()

    def hook(owner, _layer, _inputs, output):
        return output * owner.inner.read()

    calls = CalledFunctions([partial(hook, store)])
    assert any(one is store.inner.rows for one in calls.containers)
