"""Special methods of the user's classes, which Python calls without their names."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import pipecompile as pc

GAIN = 1.0


class Gain:
    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        return h * GAIN

    def __getitem__(self, _: int) -> float:
        return GAIN

    def __len__(self) -> int:
        return int(GAIN)

    def __iter__(self) -> Iterator[float]:
        return iter([GAIN])

    def __bool__(self) -> bool:
        return GAIN > 1.5

    def __mul__(self, other: float) -> float:
        return GAIN * other

    def __enter__(self) -> float:
        return GAIN

    def __exit__(self, *_: object) -> None:
        return None

    def __getattr__(self, name: str) -> float:
        if name == "gain":
            return GAIN
        raise AttributeError(name)


class Descriptor:
    def __get__(self, holder: object, kind: object = None) -> float:
        return GAIN


class Described:
    gain = Descriptor()


class Made:
    def __init__(self) -> None:
        self.gain = GAIN


def entered(gain: Any) -> float:
    with gain as value:
        return value


USES = {
    "call": lambda gain, h: gain(h),
    "getitem": lambda gain, h: h * gain[0],
    "len": lambda gain, h: h * len(gain),
    "iter": lambda gain, h: h * sum(one for one in gain),
    "bool": lambda gain, h: h * 2 if gain else h,
    "mul": lambda gain, h: h * (gain * 2),
    "with": lambda gain, h: h * entered(gain),
    "getattr": lambda gain, h: h * gain.gain,
    "descriptor": lambda _, h: h * Described().gain,
    "construction": lambda _, h: h * Made().gain,
}


class UsesGain(nn.Module):
    def __init__(self, use: Any) -> None:
        super().__init__()
        self.first, self.last, self.gain, self.use = nn.Linear(4, 4), nn.Linear(4, 4), Gain(), use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.use(self.gain, self.first(x)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", USES)
def test_special_methods_are_guarded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they read, and whether they are still the same, was not looked at."""
    torch.manual_seed(0)
    model, x = UsesGain(USES[kind]), torch.randn(4, 4)
    pipe = pc.compile(model, 2, example_args=(x,), n_microbatches=2, cost="analytic", devices=["cpu"] * 2).eval()
    with torch.no_grad():
        for gain in (1.0, 2.0, 3.0):
            monkeypatch.setitem(globals(), "GAIN", gain)
            assert torch.equal(pipe(x), torch.cat([model(part) for part in x.chunk(2)]))
        monkeypatch.setattr(Gain, "__call__", lambda _, h: h * 5)
        monkeypatch.setattr(Gain, "__getitem__", lambda *_: 5)
        assert torch.equal(pipe(x), torch.cat([model(part) for part in x.chunk(2)]))


class Holding(nn.Module):
    """Finds a function of torch by a module that an object holds, or a function by a name that an attribute has."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(4, 4), how
        self.library = functional if how == "attribute" else SimpleNamespace(library=functional)
        self.libraries, self.kind = {"functional": functional}, "chosen"

    def forward(self, x: torch.Tensor) -> Any:
        h = self.layer(x)
        if self.how == "name":
            return getattr(operations, self.kind)(h)
        if self.how == "dict":
            return self.libraries["functional"].gelu(h)
        return (self.library if self.how == "attribute" else self.library.library).gelu(h)


operations = ModuleType("operations")
operations.chosen = lambda h: h.tanh()  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", ["attribute", "object", "dict", "name"])
def test_a_function_that_is_replaced_in_a_module_is_noticed(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Holding(how), torch.randn(2, 4)
    pipe = pc.compile(model, 1, n_microbatches=1, example_args=(x,), cost="analytic")
    assert torch.equal(pipe(x), model(x))
    scope, name = (operations, "chosen") if how == "name" else (functional, "gelu")
    monkeypatch.setattr(scope, name, lambda h: 2 * h)
    assert torch.equal(pipe(x), model(x))
    assert pipe.explain().traces == 2
