from __future__ import annotations

from pipecompile.schedules.placement import loop


def test_stages_are_dealt_out_like_cards() -> None:
    assert loop(8, 4) == (0, 1, 2, 3, 0, 1, 2, 3)
    assert loop(3, 3) == (0, 1, 2)
