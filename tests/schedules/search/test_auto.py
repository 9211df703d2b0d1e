from __future__ import annotations

from random import Random

import pytest
from schedules_auto import draw, outcome

from pipecompile.errors import InputError, ScheduleError
from pipecompile.ir import Kind, Route, Schedule, chain
from pipecompile.passes import lower
from pipecompile.schedules import CATALOGUE, auto_schedule, build_schedule
from pipecompile.schedules.building_blocks import loop, vee
from pipecompile.schedules.search import auto
from pipecompile.schedules.search.catalogue_candidates import catalogue_candidates
from pipecompile.schedules.search.list_search import ListSearch
from pipecompile.schedules.search.makespan_bound import makespan_lower_bound
from pipecompile.schedules.search.workload import make_workload
from pipecompile.simulation.costs import make_costs
from pipecompile.simulation.simulator import simulate
from pipecompile.verifiers import verify

SLOW = {"forward": [1.0, 2.0, 1.0, 1.5], "input_grad": [1.0, 2.5, 1.0, 1.0], "weight_grad": [1.0, 1.5, 0.5, 1.0]}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", range(10))
def test_random_profiles_fit_and_are_no_worse_than_the_catalogue(number: int) -> None:
    """benchmarks/schedules_auto.py has a thousand of them, searched for longer."""
    profile = draw(Random(f"test {number}"), most_devices=4, most_microbatches=8)
    found = outcome(profile, effort=0.1)
    assert not found.is_worse
    assert found.found >= found.bound * (1 - 1e-9)


@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("chunks", [1, 2])
def test_equal_stages_reach_the_bound(p: int, chunks: int) -> None:
    m = 3 * p
    schedule = auto_schedule(p * chunks, m, n_devices=p, effort=0.2)
    verify(schedule)
    assert schedule.name == "auto"
    assert simulate(schedule).makespan == 3 * m * chunks + p - 1


def test_unequal_stages_reach_their_bound_where_memory_allows() -> None:
    schedule = auto_schedule(4, 12, transfer=0.5, **SLOW)
    costs = make_costs(4, 4, chain(4), transfer=0.5, **SLOW)
    bound = makespan_lower_bound(make_workload(loop(4, 4), chain(4), costs), 12)
    assert simulate(schedule, transfer=0.5, **SLOW).makespan == pytest.approx(bound)


def test_memory_is_kept_to_the_byte_with_the_buffers_of_values() -> None:
    routes = tuple(Route(route.value, route.source, route.consumers, 7.0) for route in chain(4))
    sizes = {"saved_bytes": 100.0, "weight_saved_bytes": 60.0, "parameter_bytes": 50.0}
    schedule = auto_schedule(4, 8, routes=routes, memory_limit=380.0, effort=0.3, **sizes)
    timeline = simulate(lower(schedule, routes), **sizes)
    assert max(timeline.peak_memory) <= 380.0
    assert max(timeline.peak_memory) > 280.0


def test_micro_batches_in_flight_are_kept() -> None:
    schedule = auto_schedule(4, 8, in_flight=[2, 2, 2, 1], effort=0.3)
    verify(schedule, in_flight=[2, 2, 2, 1])


def test_recomputation_makes_room_where_it_may() -> None:
    sizes = {"saved_bytes": 100.0, "recipe_bytes": 1.0}
    plain = auto_schedule(4, 8, memory_limit=210.0, effort=0.3, **sizes)
    again = auto_schedule(4, 8, memory_limit=210.0, effort=0.3, checkpoint="auto", **sizes)
    assert all(action.kind is not Kind.RECOMPUTE for row in plain.rows for action in row)
    assert any(action.kind is Kind.RECOMPUTE for row in again.rows for action in row)
    assert simulate(again, **sizes).makespan < simulate(plain, **sizes).makespan
    assert max(simulate(again, **sizes).peak_memory) <= 210.0
    always = auto_schedule(2, 3, checkpoint="always", effort=0.1)
    assert sum(action.kind is Kind.RECOMPUTE for row in always.rows for action in row) == 6


def test_whole_backwards_stay_whole() -> None:
    schedule = auto_schedule(4, 8, split=False, effort=0.3, **SLOW)
    kinds = {action.kind for row in schedule.rows for action in row}
    assert kinds == {Kind.FORWARD, Kind.BACKWARD}
    whole = (build_schedule(name, 4, 8) for name in ("gpipe", "1f1b", "eager-1f1b"))
    assert simulate(schedule, **SLOW).makespan <= min(simulate(each, **SLOW).makespan for each in whole)


def test_a_placement_is_kept_whatever_it_is() -> None:
    schedule = auto_schedule(5, 6, placement=(0, 0, 1, 2, 1), effort=0.2)
    verify(schedule)
    assert schedule.placement == (0, 0, 1, 2, 1)
    assert auto_schedule(4, 4, n_devices=2, effort=0.1).placement in (loop(4, 2), vee(2))
    assert auto_schedule(5, 4, n_devices=2, effort=0.1).placement == loop(5, 2)


def test_skips_are_waited_for() -> None:
    routes = (*chain(4), Route("skip", 0, (3,)))
    schedule = auto_schedule(4, 6, routes=routes, transfer={"v0": 0, "v1": 0, "v2": 0, "skip": 9.0}, effort=0.2)
    verify(schedule, routes=routes)
    assert (
        auto_schedule(4, 6, routes=routes, transfer={**dict.fromkeys(("v0", "v1", "v2"), 0.0), "skip": 9.0}, effort=0.2)
        == schedule
    )


def test_nothing_fits_and_what_is_needed() -> None:
    message = (
        r"no schedule of 2 stages on 2 devices fits the memory\n"
        r"  why    one micro-batch after another needs 100 bytes on device 0, the limit is 99 bytes\n"
        r"  try    memory_limit=100, more devices, .*checkpoint='auto'"
    )
    with pytest.raises(ScheduleError, match=message):
        auto_schedule(2, 4, memory_limit=99.0, saved_bytes=100.0)
    with pytest.raises(
        ScheduleError, match=r"needs 1 micro-batch in flight on device 1, the limit is 0\.5 micro-batches in flight"
    ):
        auto_schedule(2, 4, in_flight=[1, 0.5])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"placement": (0, 2, 1, 0)}, r"placement=\(0, 2, 1, 0\) has no device for each of 3 stages"),
        ({"placement": (0, 2, 0)}, "has no device for each of 3 stages\n  try    devices are 0, 1, 2"),
        ({"n_devices": 4}, "3 stages cannot be placed on 4 devices"),
        ({"memory_limit": 1.0, "in_flight": 1.0}, "memory_limit and in_flight cannot both be given"),
        ({"in_flight": [1.0]}, "in_flight has 1 number for 3 devices"),
        ({"forward": [1.0]}, "forward has 1 number for 3 stages"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        auto_schedule(3, 4, **arguments)  # type: ignore[arg-type]


def test_never_worse_than_a_catalogue_schedule_that_happens_to_be_best() -> None:
    """Equal stages, and memory that V-Min was made for."""
    schedule = auto_schedule(8, 8, n_devices=4, in_flight=2, effort=0.2)
    rivals = [build_schedule(n, 8, 8, n_devices=4) for n, e in CATALOGUE.items() if e.chunks != 1 and e.compared]
    fitting = [rival for rival in rivals if max(simulate(rival).peak_in_flight) <= 2]
    assert {rival.name for rival in fitting} == {"v-min"}
    assert simulate(schedule).makespan <= simulate(fitting[0]).makespan
    assert isinstance(schedule, Schedule)


def test_stages_that_take_no_time_are_scheduled_as_well() -> None:
    idle = [1.0, 1.0, 0.0, 0.0]
    found = auto_schedule(4, 6, n_devices=2, forward=idle, input_grad=idle, weight_grad=idle)
    assert found.n_microbatches == 6


@pytest.mark.parametrize("times", [(2.0, 0.0), (0.0, 2.0), (0.0, 0.0)])
def test_stages_that_take_no_time_are_scheduled(times: tuple[float, float]) -> None:
    """A stage is empty when its device is so slow, or its link, that the cut leaves it out."""
    costs = {"forward": times, "input_grad": times, "weight_grad": times}
    schedule = auto_schedule(2, 4, effort=0.1, **costs)
    verify(schedule)
    assert simulate(schedule, **costs).makespan == 12 * max(times)


@pytest.mark.parametrize(
    "costs",
    [
        {"forward": [0.0, 2.0462195284675513, 1.0], "input_grad": 0.0, "weight_grad": [0.4893, 0.6774, 0.4753], "launch": 0.2},
        {"launch": 0.5},
        {"launch": [0.1, 2.0, 0.3], "hosts": "device", "transfer": 0.4, "engines": "device"},
        {"streams": [0, 0, 1], "transfer": 0.7},
        {"streams": [0, 0, 0], "launch": 0.1},
    ],
)  # fmt: skip
def test_the_certificate_is_that_of_the_simulation_under_the_very_costs(costs: dict[str, object]) -> None:
    """Launches by the host and shared streams were dropped: an "optimal" schedule took longer than 2BP of the catalogue."""
    found = auto_schedule(3, 9, effort=0.1, **costs)  # type: ignore[arg-type]
    certificate, makespan = found.certificate, simulate(found, **costs).makespan  # type: ignore[arg-type]
    assert certificate is not None
    assert certificate.seconds == makespan
    for rival in catalogue_candidates(3, 9, 3, chain(3), split=True):
        seconds = simulate(rival, **costs).makespan  # type: ignore[arg-type]
        assert makespan <= seconds * (1 + 1e-9)
        assert certificate.bound <= seconds * (1 + 1e-9)


def test_a_host_that_launches_all_the_time_is_a_bound_that_is_met() -> None:
    found = auto_schedule(1, 5, effort=0.1, forward=0.0, input_grad=0.05, weight_grad=0.0, launch=0.2)
    assert found.certificate is not None
    assert found.certificate.bound == pytest.approx(3.0)
    assert found.certificate.is_optimal


@pytest.mark.parametrize(("n_stages", "devices", "m"), [(6, 2, 1), (9, 3, 2)])
def test_waves_are_found_where_transfers_are_slow(n_stages: int, devices: int, m: int) -> None:
    """The loop alone was tried, and certified as optimal at 68 seconds, where Hanayo takes 48."""
    found = auto_schedule(n_stages, m, n_devices=devices, split=False, effort=0.1, transfer=5.0)
    waves = build_schedule("hanayo", n_stages, m, n_devices=devices)
    assert found.certificate is not None
    assert found.certificate.bound <= simulate(waves, transfer=5.0).makespan
    assert simulate(found, transfer=5.0).makespan <= simulate(waves, transfer=5.0).makespan


def test_after_the_time_limit_one_list_search_that_fits_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """No schedule of the catalogue fits without recomputation, and "auto" tries several sets of stages."""
    tried = []
    try_rules = ListSearch.try_rules

    def counted(search: ListSearch, budget: float) -> None:
        try_rules(search, budget)
        tried.append(search.best is not None)

    monkeypatch.setattr(ListSearch, "try_rules", counted)
    monkeypatch.setattr(auto, "catalogue_candidates", lambda *_, **__: [])
    costs = {"saved_bytes": 4.0, "recipe_bytes": 0.5, "memory_limit": 9.0, "checkpoint": "auto"}
    auto_schedule(4, 8, time_limit=1e-9, **costs)
    assert tried.index(True) == len(tried) - 1
    tried.clear()
    auto_schedule(4, 8, **costs)
    assert len(tried) > 1
