"""What forwards change, undone for the length of a recomputation."""

import gc
import weakref
from collections import deque
from contextlib import nullcontext
from contextvars import ContextVar

import pytest
import torch
from torch import nn

from pipecompile.tracing.recompute_flag import is_recomputing
from pipecompile.tracing.state.change_log import ChangeLog, StateHolders, writes_noted

pytestmark = pytest.mark.smoke


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.names = 0, deque(maxlen=2), {"a": 0}
        self.average, self.layer = torch.zeros(2), nn.Linear(2, 2)
        self.register_buffer("scale", torch.ones(2))

    def run(self, value: float) -> None:
        self.calls += 1
        self.seen.append(value)
        self.names[str(value)] = self.calls
        self.average.add_(value)
        with torch.no_grad():
            self.layer.bias.fill_(value)
        self.scale = self.scale * 2

    def state(self):
        return (
            self.calls, list(self.seen), list(self.names), self.average.tolist(), self.layer.bias.tolist(), self.scale.tolist(),
        )  # fmt: skip


def logged(log: ChangeLog, holders: StateHolders, model: Stateful, value: float):
    """Run a forward. Return its change and the state after it."""
    with log.noted(holders) as change, writes_noted(model):
        model.run(value)
    return change, model.state()


def test_a_recomputation_begins_in_the_state_of_its_forward_and_leaves_the_present_one():
    model, log = Stateful(), ChangeLog()
    holders, begin = StateHolders((model,)), model.state()
    first, after_first = logged(log, holders, model, 1.0)
    second, after_second = logged(log, holders, model, 2.0)
    for change, then, after in ((first, begin, after_first), (second, after_first, after_second)):
        with log.undone(change) as written:
            assert model.state() == then
            model.run(1.0 if change is first else 2.0)
            assert model.state() == after
        assert model.state() == after_second
        assert any(one is model.average for one in written)


def test_memory_that_a_tensor_is_given_is_exchanged():
    model, log = Stateful(), ChangeLog()
    holders = StateHolders((model,))
    with log.noted(holders) as change, writes_noted(model):
        model.average.data = torch.ones(2)
    with log.noted(holders), writes_noted(model):
        model.average.add_(1)
    now = model.average.data_ptr()
    with log.undone(change):
        assert model.average.tolist() == [0, 0]
    assert (model.average.tolist(), model.average.data_ptr()) == ([2, 2], now)


def test_objects_that_a_loss_names_are_holders():
    criterion, log = Stateful(), ChangeLog()

    def loss(value: float) -> None:
        criterion.run(value)

    with log.noted(StateHolders((loss,))) as change, writes_noted(loss):
        loss(3.0)
    with log.undone(change):
        assert (criterion.calls, criterion.average.tolist()) == (0, [0, 0])
    assert (criterion.calls, criterion.average.tolist()) == (1, [3, 3])


def test_a_change_is_freed_with_the_last_recomputation_that_may_undo_it():
    model, log = Stateful(), ChangeLog()
    holders = StateHolders((model,))
    first, _ = logged(log, holders, model, 1.0)
    copy = weakref.ref(first.copies[0][1])
    second, _ = logged(log, holders, model, 2.0)
    del first
    gc.collect()
    assert copy() is None
    assert second.containers


def test_nothing_is_noted_outside_of_a_forward():
    assert isinstance(writes_noted(None), nullcontext)


def test_a_holder_that_asks_whether_it_is_recomputed_takes_care_of_its_state():
    aware, other, log = Stateful(), Stateful(), ChangeLog()
    with log.noted(StateHolders((aware, other))) as change:
        with writes_noted(aware):
            assert not is_recomputing()
            aware.run(1.0)
        with writes_noted(other):
            other.run(1.0)
    with log.undone(change):
        assert (aware.calls, aware.average.tolist()) == (1, [1, 1])
        assert (other.calls, other.average.tolist()) == (0, [0, 0])


TALLY: ContextVar[int] = ContextVar("TALLY", default=0)


class Tallied(nn.Module):
    """Binds names outside of itself."""

    total = 0

    def forward(self) -> int:
        type(self).total += 1
        TALLY.set(TALLY.get() + 1)
        return self.total + TALLY.get()


def test_names_outside_are_bound_as_at_the_begin_of_the_forward() -> None:
    model, log = Tallied(), ChangeLog()
    holders, changes = StateHolders((model,)), []
    for step in range(3):
        with log.noted(holders) as change:
            assert model() == 2 * (step + 1)
        changes.append(change)
    with log.undone(changes[1]):
        assert model() == 4
    assert (Tallied.total, TALLY.get()) == (3, 3)
    with log.undone(changes[0]):
        assert (Tallied.total, TALLY.get()) == (0, 0)
