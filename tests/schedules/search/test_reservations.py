from __future__ import annotations

from hypothesis import given, settings
from hypothesis.strategies import floats, lists, tuples

from pipecompile.schedules.search.reservations import Reservations


def test_a_reservation_holds_in_every_period() -> None:
    table = Reservations(4.0, 1)
    assert table.reserve(0, 1.0, 2.0) == 1.0
    assert table.reserve(0, 5.0, 1.0) == 7.0  # [5, 7) is reserved as well
    assert table.reserve(0, 10.5, 1.0) == 12.0
    assert table.reserve(0, 0.0, 0.5) is None


def test_devices_have_reservations_of_their_own_and_nothing_takes_no_room() -> None:
    table = Reservations(1.0, 2)
    assert table.reserve(0, 0.0, 1.0) == 0.0
    assert table.reserve(1, 0.0, 1.0) == 0.0
    assert table.reserve(0, 0.25, 0.0) == 0.25
    assert table.reserve(0, 0.0, 1.5) is None


@settings(max_examples=60, deadline=None)
@given(lists(tuples(floats(0, 20), floats(0.01, 2)), max_size=8))
def test_no_two_reservations_overlap_in_any_period(asked: list[tuple[float, float]]) -> None:
    table, taken = Reservations(5.0, 1), list[tuple[float, float]]()
    for earliest, seconds in asked:
        start = table.reserve(0, earliest, seconds)
        if start is not None:
            assert start >= earliest
            taken.append((start % 5.0, seconds))
    repeated = sorted((start + shift, seconds) for start, seconds in taken for shift in (0.0, 5.0))
    for (start, seconds), (following, _) in zip(repeated, repeated[1:], strict=False):
        assert start + seconds <= following + 1e-6
