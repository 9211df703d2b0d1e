"""A model whose results depend on what an earlier call left is refused, although each call computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc


class Net(nn.Module):
    def __init__(self, results: Callable[[Any, torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.n, self.last = nn.Linear(4, 4), nn.Linear(4, 4), 0, None
        self.results = results

    def forward(self, x: torch.Tensor) -> Any:
        self.n += 1
        left, right = self.a(x), self.b(x)
        before, self.last = self.last, left.detach()
        return self.results((self.n, before), left, right)


STATEFUL = {
    "a counter": lambda state, left, _: (left, state[0]),
    "another tensor": lambda state, left, right: (left, right)[state[0] % 2],
    "another key": lambda state, left, _: {"odd" if state[0] % 2 else "even": left},
    "the value of the last call": lambda state, left, _: {"now": left, "before": state[1]},
}


@pytest.mark.parametrize("name", STATEFUL)
def test_results_that_depend_on_an_earlier_call_are_refused(name: str) -> None:
    with pytest.raises(pc.TraceError, match="PC114") as told:
        pc.trace(Net(STATEFUL[name]), torch.randn(3, 4))
    assert told.value.__cause__ is not told.value


class Made:
    """An object that every call makes anew."""


def test_results_that_every_call_makes_anew_are_alike() -> None:
    model = Net(
        lambda _, left, right: {"sum": left + right, "text": f"a{len(left)}", "made": Made(), "rows": left.shape[0]}
    )
    graph = pc.trace(model, torch.randn(3, 4))
    x = torch.randn(3, 4)
    made = graph(x)
    assert torch.equal(made["sum"], model(x)["sum"])
    assert model.n == 2, "the graph counts as the model does"
