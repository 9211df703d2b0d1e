"""A schedule is legal by arrays if and only if the verifier of schedules finds no fault."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest
from periodic_damages import HOW, damaged

from pipecompile.ir import Route, chain
from pipecompile.schedules.periods import build_periodic
from pipecompile.verifiers.array_schedule import Waits, waits_of_legal
from pipecompile.verifiers.schedule import schedule_faults

SCHEDULES = [
    build_periodic(name, 4 if name in ("interleaved", "zbv", "po-half") else 2, 12, n_devices=2)
    for name in ("1f1b", "zb-h2", "interleaved", "zbv", "mario", "po-half")
]


@pytest.mark.parametrize("how", HOW)
def test_verdicts_of_damaged_schedules_are_those_of_the_verifier(how: str, pytestconfig: pytest.Config) -> None:
    verdicts = Counter[bool]()
    for number in range(1500 if pytestconfig.getoption("--full") else 60):
        rng = Random(f"{how} {number}")
        schedule = damaged(rng, rng.choice(SCHEDULES), how)
        routes = (*chain(schedule.n_stages), Route("skip", 0, (schedule.n_stages - 1,)))
        is_right = not schedule_faults(schedule.unrolled(), routes)
        assert (waits_of_legal(schedule, routes, schedule.repetitions) is not None) == is_right, str(schedule)
        verdicts[is_right] += 1
    assert verdicts[False]


def test_rows_that_wait_for_one_another_do_not_end() -> None:
    """Row 0: a, then b after d. Row 1: c, then d; d after b is a cycle."""
    starts, pairs = np.array([0, 2, 4]), [(np.array([1]), np.array([3]))]
    waits = Waits.of(pairs, starts)
    assert waits is not None
    assert waits.end()
    assert waits.closed(np.array([1, 1])).tolist() == [1, 1]
    assert waits.closed(np.array([2, 0])).tolist() == [2, 2]
    cycle = Waits.of([*pairs, (np.array([3]), np.array([1]))], starts)
    assert cycle is not None
    assert not cycle.end()
    assert Waits.of([(np.array([0]), np.array([1]))], starts) is None
