"""An action is STAGE KIND MICROBATCH and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecompile.errors import ScheduleError
from pipecompile.ir import SHARDING, Action, Kind

NUMBERS = st.integers(0, 10**9 - 1)
CELLS = st.builds(Action, NUMBERS, st.sampled_from([kind for kind in Kind if kind not in SHARDING]), NUMBERS)


@given(CELLS | st.builds(Action, NUMBERS, st.sampled_from(SHARDING)))
def test_an_action_parses_back(action: Action) -> None:
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "text",
    [
        "2F0garbage",
        "2X0",
        "",
        "F0",
        "2F",
        "2f0",
        " 2F0",
        "2F0\n",
        "-1F0",
        "2F٣",
        "2" * 5000 + "F0",
        "2UNSHARD0",
        "UNSHARD",
        "2REDUCE",
    ],
)
def test_anything_else_is_no_action(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not an action"):
        Action.parse(text)


def test_kinds_have_the_letters_of_the_papers() -> None:
    cells = [str(Action(2, kind, 0)) for kind in Kind if kind not in SHARDING]
    assert cells == ["2F0", "2B0", "2I0", "2W0", "2R0", "2OFFLOAD0", "2RELOAD0"]
    assert [str(Action(2, kind)) for kind in SHARDING] == ["2UNSHARD", "2RESHARD", "2REDUCE_GRAD"]


@given(CELLS, st.integers(-(10**9), 10**9))
def test_an_action_that_is_moved_there_and_back_is_the_same(action: Action, microbatches: int) -> None:
    """Micro-batch -1 on the way there is a number like others."""
    assert action.later(-microbatches).later(microbatches) == action
    assert action.later(-action.microbatch - 1).later(action.microbatch + 1) == action


def test_an_action_without_a_micro_batch_stays_as_it_is() -> None:
    assert Action(2, Kind.UNSHARD).later(3) == Action(2, Kind.UNSHARD)
    assert str(Action(2, Kind.WEIGHT_GRAD, 0).later(-1)) == "2W-1"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("2f0", "2F0"), ('"2F0"', "2F0"), ("2 F 0", "2F0"), ("0F0;0B0", "0F0,0B0"), ("0F0\t0B0", "0F0,0B0"), ("0F0 0B0", "0F0,0B0"),
        ("0F0;0F1;0F2;0B0;0B1", "0F0,0F1,0F2,0B0,..."), ("2X0", ""), ("# mine", ""), ("", ""),
    ],
)  # fmt: skip
def test_the_error_says_what_was_probably_meant(text: str, hint: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Action.parse(text)
    assert caught.value.hint == hint
