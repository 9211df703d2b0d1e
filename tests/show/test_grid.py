"""The text grid, expected in the shape it is drawn."""

from __future__ import annotations

import pytest

from pipecompile.errors import InputError
from pipecompile.ir.timeline import COMPUTE, Span, Timeline
from pipecompile.show.grid import timeline_grid

TWO_BY_TWO = """\
       0   1   2   3   4   5   6   7   8
dev 0  0F0 0F1 .   .   0B0---- .   0B1----
dev 1  .   1F0 1B0---- 1F1 1B1---- .   .
"""


def timeline(*spans: tuple[int, str, float, float], n_devices: int = 2) -> Timeline:
    return Timeline(n_devices, tuple(Span(d, COMPUTE, name, start, end) for d, name, start, end in spans))


def test_a_cell_per_tick_and_a_bar_for_longer_ones(one_f_one_b, played):
    drawn = timeline_grid(played(one_f_one_b(2, 2), unit=1.0, copy=0.0))
    assert drawn == TWO_BY_TWO, f"got\n{drawn}"


def test_what_is_too_wide_goes_on_below_with_its_bar_cut(one_f_one_b, played):
    drawn = timeline_grid(played(one_f_one_b(2, 2), unit=1.0, copy=0.0), width=30)
    assert drawn == (
        "       0   1   2   3   4\n"
        "dev 0  0F0 0F1 .   .   0B0\n"
        "dev 1  .   1F0 1B0---- 1F1\n"
        "\n"
        "       5   6   7   8\n"
        "dev 0  --- .   0B1----\n"
        "dev 1  1B1---- .   .\n"
    ), f"got\n{drawn}"


def test_one_block_without_a_width(one_f_one_b, played):
    drawn = timeline_grid(played(one_f_one_b(4, 32), unit=1.0, copy=0.0), width=None)
    assert len(drawn.splitlines()) == 1 + 4
    assert drawn.count("F31") == 4


def test_time_starts_at_the_first_span_and_ticks_are_as_long_as_asked():
    late = timeline((0, "0F0", 5.0, 5.5), (1, "1F0", 5.5, 6.0))
    assert timeline_grid(late, tick=0.5) == "       0   1\ndev 0  0F0 .\ndev 1  .   1F0\n"


def test_columns_are_as_wide_as_the_longest_name():
    wide = timeline((0, "10F11", 0, 1), (0, "0F0", 1, 2), n_devices=1)
    assert timeline_grid(wide) == "       0     1\ndev 0  10F11 0F0\n"


def test_nothing_at_all_is_drawn_as_nothing():
    assert timeline_grid(Timeline(2, ())) == ""


@pytest.mark.parametrize("tick", [0.0, -1.0, 1e-9])
def test_a_useless_tick_is_refused(tick):
    with pytest.raises(InputError, match="cannot show"):
        timeline_grid(timeline((0, "0F0", 0, 1)), tick=tick)
