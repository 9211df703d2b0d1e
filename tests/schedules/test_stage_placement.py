from __future__ import annotations

from pipecompile.schedules.stage_placement import loop, vee


def test_stages_are_dealt_out_like_cards() -> None:
    assert loop(8, 4) == (0, 1, 2, 3, 0, 1, 2, 3)
    assert loop(3, 3) == (0, 1, 2)


def test_stages_go_down_and_come_back_up() -> None:
    assert vee(4) == (0, 1, 2, 3, 3, 2, 1, 0)
    assert vee(1) == (0, 0)
