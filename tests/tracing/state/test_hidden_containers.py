"""State in slots, arrays, tuples and closures: found, and restored after runs that are not the user's own."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.tracing.state.hidden_containers import Slots, hidden_container, identity
from pipecompile.tracing.state.snapshot import contents_restored, model_restored, places_of

pytestmark = [pytest.mark.smoke, pytest.mark.filterwarnings("ignore::pipecompile.RecordingWarning")]


class Slotted:
    __slots__ = ("__hidden", "count", "seen")

    def __init__(self) -> None:
        self.count, self.seen, self.__hidden = 0, [], 1

    def run(self) -> None:
        self.count += 1
        self.seen.append(self.count)
        self.__hidden += 1

    def state(self) -> Any:
        return self.count, list(self.seen), self.__hidden


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slots, self.array, self.table = Slotted(), np.zeros(3), (torch.zeros(2), [0], frozenset({1}))
        count = 0

        def increase() -> int:
            nonlocal count
            count += 1
            return count

        self.increase = increase

    def run(self) -> int:
        self.slots.run()
        self.array[1] += 1
        self.table[0].add_(1)
        self.table[1][0] += 1
        return self.increase()

    def state(self) -> Any:
        return self.slots.state(), self.array.tolist(), self.table[1][0]


def test_state_in_slots_arrays_tuples_and_closures_is_restored() -> None:
    model = Holder()
    assert model.run() == 1
    before = model.state()
    with model_restored(model):
        assert model.run() == 2
        assert model.state() != before
    assert model.state() == before
    assert model.run() == 2


def test_a_slot_that_was_empty_is_empty_again() -> None:
    value = Slotted()
    del value.count
    view = hidden_container(value, frozenset())
    assert [name for name, _ in view.pairs()] == ["_Slotted__hidden", "seen"]
    with contents_restored(places_of(value, deep=True)):
        value.count = 3
    assert not hasattr(value, "count")
    assert identity(view) == identity(Slots(value)) == id(value)


def test_what_is_large_cannot_be_written_or_is_not_the_users_is_left_out() -> None:
    fixed = np.zeros(2)
    fixed.setflags(write=False)
    assert hidden_container(fixed, frozenset()) is None
    assert hidden_container(np.zeros(2**22), frozenset()) is None
    assert hidden_container(torch.Size([1]), frozenset()) is None
    assert hidden_container(Slotted(), frozenset({__name__.partition(".")[0]})) is None
    assert hidden_container(3, frozenset({"builtins"})) is None


class Kept(Holder):
    """Is kept whole, so that trial runs run it."""

    def __init__(self) -> None:
        super().__init__()
        del self.increase
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 1e9:
            return x
        self.slots.run()
        self.array[int(x.argmax()) % 3] += 1
        self.table[0].add_(x.detach().mean())
        self.table[1][0] += 1
        return self.layer(x) * (self.slots.count + float(self.array.sum())) + self.table[0].sum() * self.table[1][0]


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_trial_runs_and_recomputations_leave_no_trace_there(checkpoint: Any) -> None:
    """A count began where the trial runs had left it, and the outputs were others than the model's, without a word."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Kept(), nn.Linear(4, 4))
    eager = copy.deepcopy(model)
    pipe = pc.compile(
        model, 2, n_microbatches=4, loss_fn=lambda y, t: (y - t).square().mean(), cost="analytic", checkpoint=checkpoint
    )
    for _ in range(3):
        x, target = torch.randn(8, 4), torch.randn(8, 4)
        losses = [(eager(a) - b).square().mean() / 4 for a, b in zip(x.chunk(4), target.chunk(4), strict=True)]
        torch.testing.assert_close(pipe.step(x, target=target), sum(losses).detach())
        assert model[1].state() == eager[1].state()
        assert torch.equal(model[1].table[0], eager[1].table[0])
