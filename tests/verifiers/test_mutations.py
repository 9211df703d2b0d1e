"""The verifier flags every damage that a brute-force run finds wrong, and none that it finds right.

A few hundred damages; ten thousand with `--full`, and benchmarks/results/mutations.md has the counts of such a run.
"""

from __future__ import annotations

from dataclasses import replace
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
    lowered_at_random,
    random_program,
    random_schedule,
    schedule_works,
    works,
)
from program_executor import MODELS

from tests.support.copies_of_stages import random_copies, redirected


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


@pytest.mark.parametrize("how", [*DAMAGES, exchanged, redirected], ids=lambda how: how.__name__)
def test_programs_with_copies_of_stages(how: Any, pytestconfig: pytest.Config) -> None:
    for number in many(pytestconfig, 15, 500):
        rng = Random(f"copies {how.__name__} {number}")
        program = lowered_at_random(rng, random_copies(rng))
        assert is_legal(program)
        assert works(program)
        if how is redirected:
            damage = replace(program, directions=redirected(rng, program.directions, program.n_microbatches))
        else:
            damage = exchanged(rng, program) if how is exchanged else damaged(rng, program, how)
        for models in (MODELS, (rng.choice(MODELS),)):
            assert is_legal(damage, models) == works(damage, models), (models, str(program), str(damage))


@pytest.mark.parametrize("how", [*SCHEDULE_DAMAGES, "directions"])
def test_schedules_with_copies_of_stages(how: str, pytestconfig: pytest.Config) -> None:
    for number in many(pytestconfig, 25, 1000):
        rng = Random(f"copies {how} {number}")
        schedule = random_copies(rng)
        if how == "directions":
            damage = replace(schedule, directions=redirected(rng, schedule.directions, schedule.n_microbatches))
        else:
            damage = damaged_schedule(rng, schedule, how)
        assert is_legal(damage) == schedule_works(damage), (
            str(schedule),
            schedule.directions,
            str(damage),
            damage.directions,
        )
