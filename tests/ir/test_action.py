"""An action is STAGE KIND MICROBATCH and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecompile.errors import ScheduleError
from pipecompile.ir import Action, Kind


@given(st.builds(Action, st.integers(0, 10**9 - 1), st.sampled_from(Kind), st.integers(0, 10**9 - 1)))
def test_an_action_parses_back(action: Action) -> None:
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "text", ["2F0garbage", "2X0", "", "F0", "2F", "2f0", " 2F0", "2F0\n", "-1F0", "2F٣", "2" * 5000 + "F0"]
)
def test_anything_else_is_no_action(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not an action"):
        Action.parse(text)


def test_kinds_have_the_letters_of_the_papers() -> None:
    assert [str(Action(2, kind, 0)) for kind in Kind] == ["2F0", "2B0", "2I0", "2W0", "2R0", "2OFFLOAD0", "2RELOAD0"]
