"""Names outside of a model that its forward binds are bound as before when it has been recorded and checked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.tracing.reachable_code import reachable
from pipecompile.tracing.state.outer_bindings import OuterBindings, OuterNames

LAST: Any = None
THIS = sys.modules[__name__]


class Registry:
    latest: Any = None


class Memory:
    def __init__(self) -> None:
        self.value: Any = None

    def put(self, value: torch.Tensor) -> None:
        self.value = value


MEMORY = Memory()


class Layers(nn.Module):
    last: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x).relu()
        self.note(h.detach().mean(0))
        y: torch.Tensor = self.b(h)
        return y

    def note(self, value: torch.Tensor) -> None:
        raise NotImplementedError


class OfGlobal(Layers):
    def note(self, value: torch.Tensor) -> None:
        global LAST  # noqa: PLW0603
        LAST = value


class OfNewGlobal(Layers):
    def note(self, value: torch.Tensor) -> None:
        global NEW  # noqa: PLW0603
        NEW = value  # type: ignore[name-defined]


class OfModule(Layers):
    def note(self, value: torch.Tensor) -> None:
        THIS.LAST = value  # type: ignore[attr-defined]


class OfNamedClass(Layers):
    def note(self, value: torch.Tensor) -> None:
        Registry.latest = value


class OfOwnClass(Layers):
    def note(self, value: torch.Tensor) -> None:
        type(self).last = value


class OfNewAttribute(Layers):
    def note(self, value: torch.Tensor) -> None:
        type(self).fresh = value  # type: ignore[attr-defined]


class OfObject(Layers):
    def note(self, value: torch.Tensor) -> None:
        MEMORY.put(value)


def of_closure() -> tuple[Layers, Callable[[], Any]]:
    last: Any = None

    class OfVariable(Layers):
        def note(self, value: torch.Tensor) -> None:
            nonlocal last
            last = value

    return OfVariable(), lambda: last


CASES: dict[str, Callable[[], tuple[Layers, Callable[[], Any]]]] = {
    "a global": lambda: (OfGlobal(), lambda: LAST),
    "a new global": lambda: (OfNewGlobal(), lambda: globals().get("NEW")),
    "an attribute of a module": lambda: (OfModule(), lambda: LAST),
    "an attribute of a class": lambda: (OfNamedClass(), lambda: Registry.latest),
    "an attribute of its own class": lambda: (OfOwnClass(), lambda: OfOwnClass.last),
    "a new attribute of its class": lambda: (OfNewAttribute(), lambda: vars(OfNewAttribute).get("fresh")),
    "an attribute of an object": lambda: (OfObject(), lambda: MEMORY.value),
    "a variable around it": of_closure,
}


@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_leaves_the_name_as_it_is_and_says_so(name: str) -> None:
    """The name was left bound to a tensor without values, and the check failed with an error of torch."""
    model, value = CASES[name]()
    x = torch.randn(8, 4)
    pipe = pc.compile(model, 2, cost="analytic", loss_fn=F.cross_entropy, n_microbatches=2)
    with pytest.warns(pc.RecordingWarning, match="is not part of the model: a pipeline leaves it as it is"):
        loss = pipe.step(x, target=torch.zeros(8, dtype=torch.long))
    assert value() is None
    assert torch.isfinite(loss)


def test_only_names_that_code_binds_are_looked_at() -> None:
    global LAST  # noqa: PLW0603
    bindings = OuterBindings(OuterNames(reachable(model := OfGlobal()), model.modules()))
    Registry.latest = MEMORY.value = 1
    assert bindings.changed() == []
    LAST = 1
    (binding,) = bindings.changed()
    assert (binding.name, binding.value) == ("LAST", None)
    binding.restore()
    assert (LAST, bindings.changed()) == (None, [])
    Registry.latest = MEMORY.value = None
