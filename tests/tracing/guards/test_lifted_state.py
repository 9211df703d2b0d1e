"""Numbers of a model that a recording reads at every run: where they are, stand-ins while recording, present values before a run."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

import pytest

from pipecompile.tracing.fakes.lifted_numbers import LiftedFloat
from pipecompile.tracing.guards.lifted_state import Holder, LiftedState


class Options:
    rate = 0.5


class Slotted:
    __slots__ = ("rate",)

    def __init__(self) -> None:
        self.rate = 0.5


def cell(value: Any) -> Any:
    def inner() -> Any:
        return value

    return inner.__closure__[0]  # type: ignore[index]


@pytest.mark.parametrize(
    ("container", "key"),
    [({"rate": 0.5}, "rate"), (OrderedDict(a=0.5), "a"), ([0.5], 0), (deque([0.5]), 0), (Options, "rate"), (Slotted(), "rate"), (cell(0.5), "cell_contents")],
)  # fmt: skip
def test_a_stand_in_is_in_the_model_while_it_is_recorded(container: Any, key: Any) -> None:
    holder = Holder(container, key)
    state = LiftedState({"rate": holder})
    with state.install():
        assert type(holder.get()) is LiftedFloat
    assert holder.get() == 0.5
    holder.put(0.25)
    assert state.function("rate") == 0.5
    assert state.refresh({"rate": holder})
    assert state.function("rate") == 0.25


def test_a_value_that_is_no_number_has_no_stand_in() -> None:
    assert not LiftedState({"flag": Holder({"flag": True}, "flag"), "text": Holder(["a"], 0)}).holders


def test_an_answer_that_changes_is_noticed() -> None:
    holder = Holder({"step": 3}, "step")
    state = LiftedState({"step": holder})
    with state.install():
        assert holder.get() < 5
    assert state.refresh({"step": holder})
    holder.put(6)
    assert not state.refresh({"step": holder})


def _changed() -> tuple[LiftedState, dict[str, Any]]:
    """Return a state whose number is 0.25 now, and its numbers from when it was 0.5."""
    holder = Holder({"rate": 0.5}, "rate")
    state = LiftedState({"rate": holder})
    before = state.numbers
    holder.put(0.25)
    state.refresh({"rate": holder})
    return state, before


def test_a_recomputation_puts_back_the_numbers_of_its_forward() -> None:
    state, before = _changed()
    with state.restored(before):
        assert state.function("rate") == 0.5
    assert state.function("rate") == 0.25


def test_two_threads_put_the_numbers_back_when_both_are_done() -> None:
    state, before = _changed()
    first, second = state.restored(before), state.restored(before)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert state.function("rate") == 0.5
    second.__exit__(None, None, None)
    assert state.function("rate") == 0.25
