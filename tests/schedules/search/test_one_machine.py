from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from pipecompile.schedules.search.one_machine import one_machine_bound


def test_an_urgent_action_interrupts_another() -> None:
    """The first runs for 2 seconds, the urgent one from 2 to 3, the rest of the first until 6; the tail of 9 decides."""
    assert one_machine_bound([(0.0, 5.0, 1.0), (2.0, 1.0, 9.0)]) == 12.0
    assert one_machine_bound([(0.0, 5.0, 8.0), (2.0, 1.0, 9.0)]) == 14.0
    assert one_machine_bound([]) == 0.0


_JOBS = st.lists(st.tuples(*(st.integers(0, 9).map(float),) * 3), min_size=1, max_size=5)


@given(_JOBS)
def test_no_order_is_shorter(jobs: list[tuple[float, float, float]]) -> None:
    assert one_machine_bound(jobs) <= min(_makespan(order) for order in permutations(jobs))


def _makespan(order: tuple[tuple[float, float, float], ...]) -> float:
    now = longest = 0.0
    for head, seconds, tail in order:
        now = max(now, head) + seconds
        longest = max(longest, now + tail)
    return longest
