from __future__ import annotations

from itertools import product
from random import Random
from typing import Any

import pytest

import pipecompile as pc
from pipecompile.errors import InputError, ScheduleError
from pipecompile.ir import HOST, Route, Tie, chain
from pipecompile.ir.periodic import PeriodicSchedule
from pipecompile.ir.periodic_program import PeriodicProgram
from pipecompile.passes import lower
from pipecompile.passes.periodic_lowering import lower_periodic, unroll
from pipecompile.schedules.catalogue import CATALOGUE, build_schedule
from pipecompile.schedules.periods import build_periodic

ONE_STAGE = ("1f1b", "eager-1f1b", "zb-h1", "zb-h2", "mario")
NAMES = (*ONE_STAGE, "interleaved", "interleaved-zb", "zbv", "v-half", "v-min", "dualpipev", "sequential", "po-half")
KEYWORDS = ("", "receive_ahead", "routes", "checkpoint")
CASES = [(name, devices, keyword) for devices in (2, 3, 4) for keyword in KEYWORDS for name in NAMES]


def keywords_of(keyword: str, stages: int) -> dict[str, Any]:
    ends = Route("x", HOST, (0,), gradient=False), Route("y", stages - 1, (HOST,)), Route("skip", 0, (stages - 1,))
    routes = (*chain(stages), *ends) if stages > 2 else chain(stages)
    ties = (Tie("w", (0, stages - 1)),)
    return {
        "": {},
        "receive_ahead": {"receive_ahead": 1},
        "routes": {"routes": routes, "ties": ties},
        "checkpoint": {"checkpoint": [stage % 2 == 0 for stage in range(stages)]},
    }[keyword]


@pytest.mark.sampled(11)
@pytest.mark.parametrize(("name", "devices", "keyword"), CASES)
def test_the_program_is_that_of_the_unrolled_schedule(name: str, devices: int, keyword: str) -> None:
    """With recomputation, early receives, skips, tied parameters, and values from and for the host."""
    stages = devices * (1 if name in ONE_STAGE else 2)
    schedule = build_periodic(name, stages, 8 * devices + 1, n_devices=devices)
    keywords = keywords_of("" if keyword == "checkpoint" and name in ("mario", "po-half") else keyword, stages)
    program = lower_periodic(schedule, **keywords)
    assert unroll(program) == lower(schedule.unrolled(), **keywords)
    assert PeriodicProgram.from_text(str(program)) == program


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("name", "devices"), [(name, devices) for name in sorted(CATALOGUE) for devices in range(1, 9)]
)
def test_every_builder_is_lowered_as_without_periods(name: str, devices: int, pytestconfig: pytest.Config) -> None:
    """Up to 8 devices and 24 micro-batches, one or two stages per device; where the schedule or its program has no period, both say so."""
    numbers = range(1, 25) if pytestconfig.getoption("--full") else Random(f"{name} {devices}").sample(range(8, 25), 2)
    for microbatches, stages in product(numbers, (devices, 2 * devices)):
        try:
            schedule = build_periodic(name, stages, microbatches, n_devices=devices)
            program = lower_periodic(schedule)
        except ScheduleError:
            continue
        assert unroll(program) == lower(schedule.unrolled())
        assert PeriodicProgram.from_text(str(program)) == program
        assert PeriodicSchedule.from_csv(str(schedule)) == PeriodicSchedule.from_json(schedule.to_json()) == schedule


def test_few_repetitions_and_more_than_lowered_are_right() -> None:
    schedule = PeriodicSchedule.from_csv("0F0,(0F1;0B0)x1+1,0B1\n(1F0;1B0)x1+1,1F1,1B1\n")
    program = lower_periodic(schedule)
    for repetitions in (1, 2, 3, 30):
        assert unroll(program, repetitions) == lower(schedule.unrolled(repetitions))


def test_its_size_is_that_of_the_period() -> None:
    few, many = (lower_periodic(build_periodic("1f1b", 4, m)) for m in (40, 4_000_000))
    assert many == few.repeated(many.repetitions)
    assert many.n_microbatches == 4_000_000
    assert repr(many) == "PeriodicProgram(n_stages=4, n_microbatches=4000000, n_devices=4, 3999997 times 1)"


def test_receives_may_come_repetitions_before_their_readers() -> None:
    """The last three repetitions of the last device receive nothing of the skip. They were compared with each other: it had no period."""
    routes = (*chain(4), Route("skip", 0, (3,)))
    schedule = build_periodic("zb-h2", 4, 33)
    assert unroll(lower_periodic(schedule, routes)) == lower(schedule.unrolled(), routes)


def test_offloads_do_not_need_all_micro_batches() -> None:
    """All were simulated and lowered: so many are refused."""
    few, many = (lower_periodic(build_periodic("po-full", 4, m, n_devices=2)) for m in (40, 4 * 10**9))
    assert many == few.repeated(many.repetitions)
    assert unroll(few) == lower(build_schedule("po-full", 4, 40, n_devices=2))


def test_what_cannot_be_lowered_so_is_refused() -> None:
    schedule = build_periodic("1f1b", 2, 16)
    with pytest.raises(InputError, match="a Schedule is not a PeriodicSchedule"):
        lower_periodic(schedule.unrolled())  # type: ignore[arg-type]
    with pytest.raises(InputError, match="checkpoint='except_last' has no period"):
        lower_periodic(schedule, checkpoint="except_last")
    with pytest.raises(InputError, match="a Program is not a PeriodicProgram"):
        unroll(lower(schedule.unrolled()))  # type: ignore[arg-type]


def test_sharded_parameters_are_simulated_and_not_lowered() -> None:
    """The kinds UNSHARD, RESHARD and REDUCE_GRAD were a KeyError in both."""
    schedule = pc.insert_sharding(pc.build_schedule("1f1b", 2, 16))
    periodic = pc.find_period(schedule)
    assert periodic is not None
    assert pc.simulate_periodic(periodic).makespan == pc.simulate(schedule).makespan
    with pytest.raises(InputError, match="UNSHARD, RESHARD and REDUCE_GRAD have no period"):
        pc.lower_periodic(periodic)
