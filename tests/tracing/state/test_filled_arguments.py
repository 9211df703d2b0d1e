"""A forward that fills a container or an object among its arguments is recorded with a warning, and the argument stays as it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc


class Filling(nn.Module):
    """Puts a hidden value into what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        hidden = self.a(x)
        if isinstance(cache, dict):
            cache[self.a] = hidden
        elif isinstance(cache, list):
            cache.append(hidden)
        elif cache is not None:
            cache.hidden = hidden
        return self.b(hidden)


@pytest.mark.parametrize("cache", [{}, [], {"seen": torch.ones(2)}, SimpleNamespace(kind="a")])
def test_a_filled_argument_is_told_and_stays_as_it_is(cache: Any) -> None:
    model, x = Filling().eval(), torch.randn(2, 4)
    pipe = pc.compile(model, 2, n_microbatches=1, cost="analytic", devices=["cpu"] * 2)
    with (
        torch.no_grad(),
        pytest.warns(pc.RecordingWarning, match=r"Filling.forward changes (cache|an object .*), an argument"),
    ):
        out = pipe(x, cache)
    assert torch.equal(out, model(x, None))
    assert len(vars(cache) if isinstance(cache, SimpleNamespace) else cache) < 2


@pytest.mark.filterwarnings("error")
def test_an_argument_that_is_read_alone_is_not_told() -> None:
    class Reads(Filling):
        def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
            return super().forward(x * cache["scale"], None)

    pc.trace(Reads(), torch.randn(2, 4), {"scale": torch.ones(2, 1), "other": 3})


class Memory:
    """Holds a tensor, a list and a number, none of which a pytree sees."""

    def __init__(self) -> None:
        self.keys, self.layers, self.seen = torch.ones(2, 1), [torch.ones(2, 1)], 1000


class Remembering(Filling):
    """Reads an object with tensors, and changes it in one of three ways."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: torch.Tensor, memory: Memory) -> torch.Tensor:
        hidden = self.a(x) * memory.keys
        if self.what == "a tensor":
            memory.keys = memory.keys + 1
        elif self.what == "a list":
            memory.layers.append(hidden)
        elif self.what == "a new attribute":
            memory.last = hidden
        memory.seen = memory.seen * 2 if self.what == "a number" else int(str(memory.seen))
        return self.b(hidden)


@pytest.mark.parametrize("what", ["a tensor", "a list", "a new attribute", "a number"])
def test_an_object_with_tensors_that_the_forward_changes_is_told_and_stays_as_it_is(what: str) -> None:
    model, x, memory = Remembering(what).eval(), torch.randn(4, 4), Memory()
    memory.keys, memory.layers = torch.ones(4, 1), [torch.ones(4, 1)]
    pipe = pc.compile(model, 2, n_microbatches=2, cost="analytic", devices=["cpu"] * 2)
    with torch.no_grad(), pytest.warns(pc.RecordingWarning, match=r"Remembering.forward changes memory, an argument"):
        out = pipe(x, memory)
    assert (memory.seen, len(memory.layers)) == (1000, 1)
    assert not hasattr(memory, "last")
    torch.testing.assert_close(out, model(x, memory))


@pytest.mark.filterwarnings("error")
def test_an_object_with_tensors_that_gets_an_equal_number_is_not_told() -> None:
    pc.trace(Remembering("nothing"), torch.randn(2, 4), Memory())
