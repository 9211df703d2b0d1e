"""The verifier flags every damage that a brute-force run finds wrong, and none that it finds right.

A few hundred damages; ten thousand with `--full`, and benchmarks/results/mutations.md has the counts of such a run.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from damages import (
    DAMAGES,
    SCHEDULE_DAMAGES,
    damaged,
    damaged_schedule,
    exchanged,
    is_legal,
    random_program,
    random_schedule,
    schedule_works,
    works,
)
from program_executor import MODELS


def many(pytestconfig: pytest.Config, few: int, all_of_them: int) -> range:
    return range(all_of_them if pytestconfig.getoption("--full") else few)


@pytest.mark.parametrize("how", [*DAMAGES, exchanged], ids=lambda how: how.__name__)
def test_programs(how: Any, pytestconfig: pytest.Config) -> None:
    for number in many(pytestconfig, 20, 800):
        rng = Random(f"{how.__name__} {number}")
        program = random_program(rng)
        damage = exchanged(rng, program) if how is exchanged else damaged(rng, program, how)
        for models in (MODELS, (rng.choice(MODELS),)):
            assert is_legal(damage, models) == works(damage, models), (models, str(program), str(damage))


def test_several_damages_at_once(pytestconfig: pytest.Config) -> None:
    for number in many(pytestconfig, 60, 2000):
        rng = Random(f"several {number}")
        damage = random_program(rng)
        for _ in range(rng.randint(2, 3)):
            if any(damage.rows):
                damage = damaged(rng, damage, rng.choice(DAMAGES))
        assert is_legal(damage) == works(damage), str(damage)


@pytest.mark.parametrize("how", SCHEDULE_DAMAGES)
def test_schedules(how: str, pytestconfig: pytest.Config) -> None:
    for number in many(pytestconfig, 40, 1000):
        rng = Random(f"{how} {number}")
        schedule = random_schedule(rng)
        damage = damaged_schedule(rng, schedule, how)
        assert is_legal(damage) == schedule_works(damage), (str(schedule), str(damage))
