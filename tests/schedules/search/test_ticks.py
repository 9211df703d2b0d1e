from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipecompile.schedules.search.ticks import Tick


def test_multiples_of_a_common_divisor_are_exact() -> None:
    tick = Tick.of([0.5, 1.5, 2.0, 0.0], 100.0, 10_000)
    assert (tick.size, tick.is_exact) == (0.5, True)
    assert [tick.down(x) for x in (0.5, 1.5, 2.0, 0.0)] == [1, 3, 4, 0]


def test_too_many_ticks_are_not_taken() -> None:
    assert not Tick.of([0.5, 1.5], 100.0, 10).is_exact


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8), st.floats(1.0, 1e4))
def test_amounts_are_rounded_down_and_capacities_up(amounts: list[float], most: float) -> None:
    tick = Tick.of(amounts, most, 1_000_000)
    for amount in amounts:
        assert tick.down(amount) * tick.size <= amount * (1 + 1e-9) + 1e-9 * tick.size
        assert tick.down(amount) * tick.size > amount - tick.size * (1 + 1e-6) - amount * 1e-9
    assert tick.up(most) * tick.size >= most * (1 - 1e-9) - 1e-9 * tick.size
    assert tick.most(most) * tick.size <= most * (1 + 1e-9) + tick.size
