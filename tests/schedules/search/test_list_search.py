from __future__ import annotations

from typing import Any

from pipecompile.ir import Route, chain
from pipecompile.passes import lower
from pipecompile.schedules.building_blocks import loop
from pipecompile.schedules.search.evaluate import Evaluator, MemoryLimit
from pipecompile.schedules.search.list_scheduling import PriorityRule, list_schedule
from pipecompile.schedules.search.list_search import ListSearch, hill_climb
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
