from __future__ import annotations

from typing import Any

import pytest

from pipecompile.ir import Route, Schedule, chain
from pipecompile.passes import lower
from pipecompile.schedules import auto_schedule, build_schedule
from pipecompile.schedules.building_blocks import loop
from pipecompile.schedules.search.evaluate import Evaluator, MemoryLimit
from pipecompile.schedules.search.list_scheduling import PriorityRule, list_schedule
from pipecompile.schedules.search.list_search import EvaluatedSchedule, ListSearch, hill_climb, lightest
from pipecompile.schedules.search.makespan_bound import makespan_lower_bound
from pipecompile.schedules.search.workload import unit_workload
from pipecompile.simulation.costs import make_costs
from pipecompile.simulation.simulator import simulate
from pipecompile.verifiers import verify

UNEVEN: dict[str, Any] = {"forward": [1.0, 2.0, 1.0], "input_grad": [1.0, 2.0, 1.5], "weight_grad": [1.0, 0.5, 1.0]}


def search(limit: MemoryLimit | None, routes: tuple[Route, ...] = chain(3), m: int = 6, **costs: Any) -> ListSearch:
    evaluator = Evaluator(loop(3, 3), routes, make_costs(3, 3, routes, **costs), limit)
    return ListSearch(evaluator, evaluator.workload(), m)


def test_more_budget_never_makes_the_best_worse() -> None:
    each = search(MemoryLimit((2.0,) * 3, in_bytes=False), **UNEVEN)
    assert each.best is None
    assert each.seconds == float("inf")
    seconds = []
    for step in (each.try_rules, each.try_rules, each.climb):
        step(2_000)
        seconds.append(each.seconds)
    assert seconds == sorted(seconds, reverse=True)
    assert each.target <= seconds[-1] < float("inf")
    assert each.best is not None
    verify(each.best.schedule, in_flight=[2, 2, 2])
    assert simulate(each.best.schedule, **UNEVEN).makespan == each.best.seconds


def test_the_capacity_is_reduced_until_the_buffers_of_values_fit() -> None:
    """What stages save takes 200 bytes of 240, and the buffers of values would not fit beside a third micro-batch."""
    routes = tuple(Route(route.value, route.source, route.consumers, 30.0) for route in chain(3))
    each = search(MemoryLimit((240.0,) * 3, in_bytes=True), routes, saved_bytes=80.0)
    each.try_rules(0)
    assert min(each.capacity) < 240.0
    assert each.best is not None
    assert max(simulate(lower(each.best.schedule, routes), saved_bytes=80.0).peak_memory) <= 240.0


def test_where_one_micro_batch_does_not_fit_there_is_no_schedule() -> None:
    each = search(MemoryLimit((50.0,) * 3, in_bytes=True), saved_bytes=80.0)
    each.try_rules(1_000)
    each.climb(1_000)
    assert each.best is None


def test_hill_climbing_improves_a_poor_rule_and_is_deterministic() -> None:
    work, m, capacity = unit_workload(loop(3, 3)), 6, (6.0,) * 3
    poor = PriorityRule((1.0,) * 3, (-0.0, -1.0, -2.0), (-10.0, -11.0, -12.0))
    start = list_schedule(work, m, capacity, poor)
    assert start is not None
    target = makespan_lower_bound(work, m, capacity)
    first, second = (hill_climb(work, m, capacity, (poor, start), target=target, runs=200) for _ in range(2))
    assert first == second
    assert target <= first.seconds < start.seconds


def test_hill_climbing_stops_at_its_target() -> None:
    work, m, capacity = unit_workload(loop(2, 2)), 3, (9.0,) * 2
    rule = PriorityRule((1.0,) * 2, (-0.0, -1.0), (-10.0, -11.0))
    start = list_schedule(work, m, capacity, rule)
    assert start is not None
    assert hill_climb(work, m, capacity, (rule, start), target=start.seconds, runs=50) is start
    assert hill_climb(work, m, capacity, (rule, start), target=0.0, runs=0) is start


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
