"""Queues of actions, loops over them, and their merging into rows."""

from __future__ import annotations

import pytest

from pipecompile.schedules.building_blocks import action_queue, action_queues, loop, merge_queues, vee


def woven(*steps: tuple[str] | tuple[str, int], kinds: str = "FB", m: int = 3) -> str:
    return " ".join(map(str, merge_queues(action_queues([0], kinds, m), *steps)))


def test_a_step_goes_round_its_lanes_so_many_times_or_until_they_are_empty() -> None:
    assert woven(("F", 1), ("F B",)) == "0F0 0F1 0B0 0F2 0B1 0B2"
    assert woven(("F", 9), ("B",)) == "0F0 0F1 0F2 0B0 0B1 0B2"
    assert woven(("F B", 0), ("F F B",)) == "0F0 0F1 0B0 0F2 0B1 0B2"


def test_lanes_are_named_by_kind_and_by_the_place_of_the_stage_when_there_are_several() -> None:
    assert list(action_queues([7], "FI", 1)) == ["F", "I"]
    assert {name: str(actions[0]) for name, actions in action_queues([0, 3], "FW", 1).items()} == {
        "F0": "0F0", "W0": "0W0", "F1": "3F0", "W1": "3W0",
    }  # fmt: skip
    assert [str(action) for action in action_queue(2, "W", 2)] == ["2W0", "2W1"]


def test_what_is_left_over_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="do not empty all queues"):
        woven(("F",))


def test_stages_are_dealt_out_like_cards() -> None:
    assert loop(8, 4) == (0, 1, 2, 3, 0, 1, 2, 3)
    assert loop(3, 3) == (0, 1, 2)


def test_stages_go_down_and_come_back_up() -> None:
    assert vee(4) == (0, 1, 2, 3, 3, 2, 1, 0)
    assert vee(1) == (0, 0)
