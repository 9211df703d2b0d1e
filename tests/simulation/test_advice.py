from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from program_strategies import catalogue_schedules

from pipecompile.errors import InputError
from pipecompile.ir import Route, Schedule
from pipecompile.schedules import build_schedule
from pipecompile.simulation.advice import Advice, advise
from pipecompile.simulation.simulator import simulate


def test_the_slow_stage_comes_first_with_what_it_would_give() -> None:
    first, second, *_ = advise(
        build_schedule("1f1b", 3, 10), forward=[1, 3, 1], input_grad=[1, 3, 1], weight_grad=[1, 3, 1]
    )
    assert first.place == 1
    assert first.makespan == 1 + 9 * 10 + 2
    assert (first.saved, first.critical) == (pytest.approx(8.7), pytest.approx(90.0))
    assert second.saved < 0.5
    assert str(first) == "stage 1: if it took 0.1 of its time less, the step would be 9.4% shorter"


def test_a_slow_link_comes_first_where_it_is_what_everybody_waits_for() -> None:
    latency = {(0, 1): 9.0, (1, 0): 0.0}
    first, *_ = advise(build_schedule("gpipe", 2, 4), faster=0.5, latency=latency)
    assert first.place == (0, 1)
    assert str(first).startswith("link 0 -> 1: if it took 0.5 of its time less")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(catalogue_schedules(max_stages=6, max_microbatches=6), st.data())
def test_what_is_promised_is_what_a_simulation_of_the_improved_costs_gives(
    schedule: Schedule, data: st.DataObject
) -> None:
    times = st.lists(st.floats(0.5, 3), min_size=schedule.n_stages, max_size=schedule.n_stages)
    forward, input_grad, weight_grad = (data.draw(times) for _ in range(3))
    costs = {"forward": forward, "input_grad": input_grad, "weight_grad": weight_grad, "transfer": 0.3}
    before = simulate(schedule, **costs).makespan
    found = advise(schedule, most=3, **costs)
    assert [advice.saved for advice in found] == sorted((advice.saved for advice in found), reverse=True)
    everything = {}
    for stage in range(schedule.n_stages):
        better = {k: [v * (0.9 if s == stage else 1.0) for s, v in enumerate(costs[k])] for k in list(costs)[:3]}
        everything[stage] = before - simulate(schedule, **{**costs, **better}).makespan
    for advice in found:
        if isinstance(advice.place, int):
            assert advice.saved == pytest.approx(everything[advice.place])
    best = max(everything.values())
    assert found[0].saved >= best - 1e-9


def test_a_share_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match=r"faster=1.5 is not a share of a time\n  why .*\n  try    faster=0.1"):
        advise(build_schedule("gpipe", 2, 2), faster=1.5)


def test_where_copies_share_an_engine_a_place_off_the_critical_path_may_shorten_the_step() -> None:
    routes = (Route("a", 0, (1, 3)), Route("b", 1, (2,)), Route("c", 2, (3,)))
    schedule = build_schedule("1f1b", 4, 3, routes=routes)
    costs = {
        "forward": [5, 4, 1, 1],
        "backward": [3, 5, 1, 1],
        "transfer": {"a": 1, "b": 4, "c": 1},
        "engines": "device",
    }
    found = {a.place: a for a in advise(schedule, routes=routes, faster=0.5, most=20, **costs)}
    assert (found[3].critical, found[3].saved) == (0.0, 4.0)
    faster = costs | {"forward": [5, 4, 1, 0.5], "backward": [3, 5, 1, 0.5]}
    saved = simulate(schedule, routes=routes, **costs).makespan - simulate(schedule, routes=routes, **faster).makespan
    assert saved == found[3].saved


def test_a_step_that_becomes_longer_is_called_longer() -> None:
    assert str(Advice(1, 0.1, -2.0, 1.0, 8.0)).endswith("the step would be 25.0% longer")
