from __future__ import annotations

from math import inf
from time import sleep

from pipecompile.schedules.search.deadline import Deadline


def test_a_step_that_would_end_too_late_is_not_allowed() -> None:
    deadline = Deadline(100.0)
    sleep(0.01)
    deadline.note()
    assert 0.01 <= deadline.longest < 50
    assert deadline.allows(0.6)
    assert not deadline.allows(0.6, steps=61 / deadline.longest)
    assert 0 < deadline.left < 100


def test_the_longest_step_counts() -> None:
    deadline = Deadline(1.0)
    sleep(0.02)
    deadline.note()
    deadline.note()
    assert deadline.longest >= 0.02


def test_without_a_limit_all_steps_are_allowed() -> None:
    assert Deadline(inf).allows(0.6, steps=1e9)
    assert not Deadline(0.0).allows(0.6)
