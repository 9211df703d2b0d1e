from __future__ import annotations

import pytest

from pipecompile.ir import Schedule, chain
from pipecompile.schedules import auto_schedule, build_schedule
from pipecompile.schedules.search.evaluate import Evaluator
from pipecompile.schedules.search.list_search import EvaluatedSchedule
from pipecompile.schedules.search.tie_breaks import lightest
from pipecompile.simulation.costs import make_costs
from pipecompile.simulation.simulator import simulate


def evaluated(schedule: Schedule, saved: float = 0.0) -> EvaluatedSchedule:
    costs = make_costs(schedule.n_stages, schedule.n_devices, chain(schedule.n_stages), saved_bytes=saved)
    evaluator = Evaluator(schedule.placement, chain(schedule.n_stages), costs, None)
    return EvaluatedSchedule(evaluator.seconds(schedule), schedule, evaluator)


@pytest.mark.parametrize("saved", [0.0, 7.0])
def test_of_equally_fast_schedules_the_one_that_holds_least_is_taken(saved: float) -> None:
    candidates = [evaluated(build_schedule(name, 4, 8), saved) for name in ("gpipe", "eager-1f1b", "1f1b")]
    assert len({candidate.seconds for candidate in candidates}) == 1
    assert lightest(candidates).schedule.name == "1f1b"


def test_time_comes_before_memory() -> None:
    candidates = [evaluated(build_schedule(name, 4, 8)) for name in ("1f1b", "zb-h2")]
    assert lightest(candidates).schedule.name == "zb-h2"


def test_of_equal_memory_the_one_with_fewer_messages_is_taken() -> None:
    rows = "0F0,1F0,2F0,3F0,3B0,2B0,1B0,0B0\n"
    one = Schedule(4, 1, (0, 0, 0, 0), Schedule.from_csv(rows).rows)
    two = Schedule.from_csv("0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0\n")
    heavy, light = evaluated(two), evaluated(one)
    assert heavy.seconds == light.seconds
    assert lightest([heavy, light]).schedule.placement == (0, 0, 0, 0)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b"])
def test_no_whole_schedule_of_the_catalogue_is_as_fast_with_less_memory(name: str) -> None:
    """The search held 16 micro-batches everywhere, where 1F1B takes as long with 4 to 1."""
    found = simulate(auto_schedule(4, 16, split=False, effort=0.1))
    theirs = simulate(build_schedule(name, 4, 16))
    assert found.makespan <= theirs.makespan
    assert found.makespan < theirs.makespan or sum(found.peak_in_flight) <= sum(theirs.peak_in_flight)


def test_the_time_limit_is_kept_with_a_legal_schedule() -> None:
    schedule = auto_schedule(8, 64, time_limit=0.0)
    assert simulate(schedule).makespan >= 3 * 64 + 7
    assert schedule.certificate is not None
