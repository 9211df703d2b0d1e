"""Inputs are copied from the host beside compute, in order, and only so far ahead as there are buffers."""

from __future__ import annotations

import pytest

import pipecompile as pc
from pipecompile.errors import InputError
from pipecompile.ir import HOST, Route, chain
from pipecompile.passes import lower
from pipecompile.runtime import stream_events
from pipecompile.runtime.launch_timeline import simulate_launches
from pipecompile.schedules import CATALOGUE, compared_names
from pipecompile.simulation.input_copies import INPUTS_AHEAD


def inputs(n_stages: int) -> tuple[Route, ...]:
    """Return the routes of a chain of stages, of its input and its target of 10 bytes, and of a mask of 2 that all stages read."""
    ends = {"x": ((0,), 10.0), "target": ((n_stages - 1,), 10.0), "mask": (tuple(range(n_stages)), 2.0)}
    return (*chain(n_stages), *(Route(name, HOST, *where, gradient=False) for name, where in ends.items()))


X = (*chain(2), Route("x", HOST, (0,), 10.0, gradient=False))


def test_the_first_input_is_waited_for_and_the_others_come_beside_compute():
    timeline = pc.simulate(pc.build_schedule("gpipe", 2, 4), routes=X, host_latency=0.25, host_bandwidth=40.0)
    copies = [(span.name, span.start, span.end) for span in timeline.spans if span.track == "from host"]
    # three buffers: the fourth copy begins when the device has read the first input, at 1.5
    assert copies == [("x#0", 0.0, 0.5), ("x#1", 0.5, 1.0), ("x#2", 1.0, 1.5), ("x#3", 1.5, 2.0)]
    assert [span.start for span in timeline.compute(0)][:4] == [0.5, 1.5, 2.5, 3.5]
    assert timeline.makespan == pc.simulate(pc.build_schedule("gpipe", 2, 4)).makespan + 0.5


def test_slow_copies_hold_the_device_up():
    timeline = pc.simulate(pc.build_schedule("gpipe", 2, 4), routes=X, host_bandwidth=5.0)
    assert [span.start for span in timeline.compute(0)][:4] == [2.0, 4.0, 6.0, 8.0]
    assert timeline.critical_path[0].track == "from host"


def test_inputs_take_no_time_by_default():
    schedule = pc.build_schedule("1f1b", 3, 6)
    timeline = pc.simulate(schedule, routes=inputs(3), transfer=0.2)
    assert timeline.makespan == pc.simulate(schedule, transfer=0.2).makespan
    assert not any(span.track == "from host" for span in timeline.spans)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "costs", [{"host_bandwidth": 30.0}, {"host_bandwidth": 4.0}, {"host_latency": 0.4, "launch": 0.1}]
)
@pytest.mark.parametrize("name", compared_names())
def test_schedule_program_and_launches_agree(name: str, costs: dict[str, float]) -> None:
    chunks = CATALOGUE[name].chunks or (2 if "interleaved" in name or "looped" in name else 1)
    for devices in (2, 3, 4):
        schedule = pc.build_schedule(name, devices * chunks, 4 * devices, n_devices=devices)
        routes = inputs(schedule.n_stages)
        program = lower(schedule, routes, overlap=True)
        simulated = pc.simulate(program, transfer=0.1, **costs)
        launched = simulate_launches(program, transfer=0.1, **costs)
        assert launched.makespan == pytest.approx(simulated.makespan, rel=0.005)
        copies = [sorted(s.name for s in one.spans if s.track == "from host") for one in (simulated, launched)]
        assert copies[0] == copies[1]
        if "launch" not in costs:  # one thread launches a program in another order than the schedule alone tells
            planned = pc.simulate(schedule, routes=routes, transfer=0.1, **costs)
            assert simulated.makespan == pytest.approx(planned.makespan, rel=0.005)


def test_as_many_inputs_are_ahead_as_there_are_buffers():
    assert INPUTS_AHEAD == stream_events.SPARE_BUFFERS + 1


def test_a_copy_begins_no_earlier_than_the_host_launches_it():
    timeline = pc.simulate(lower(pc.build_schedule("gpipe", 2, 3), X), host_bandwidth=10.0, launch=2.0)
    copies = [span.start for span in timeline.spans if span.track == "from host"]
    plan = simulate_launches(lower(pc.build_schedule("gpipe", 2, 3), X, overlap=True), host_bandwidth=10.0, launch=2.0)
    assert copies == [span.start for span in plan.spans if span.track == "from host"]
    assert copies[1] >= 2.0


def test_with_engines_per_device_inputs_and_values_share_the_receiving_engine():
    routes = (*chain(2), Route("target", HOST, (1,), 10.0, gradient=False))
    costs = {"transfer": 1.0, "host_bandwidth": 5.0}
    ends = [
        pc.simulate(pc.build_schedule("gpipe", 2, 4), routes=routes, engines=e, **costs).makespan
        for e in ("pair", "device")
    ]
    assert ends[0] < ends[1]


def test_a_periodic_schedule_takes_as_long_as_its_rows():
    periodic = pc.build_periodic("1f1b", 3, 24)
    costs = {"routes": inputs(3), "host_bandwidth": 6.0}
    assert (
        pc.simulate_periodic(periodic, **costs).makespan
        == pc.simulate(pc.build_schedule("1f1b", 3, 24), **costs).makespan
    )


def test_advice_names_the_link_from_the_host():
    routes = X
    program = lower(pc.build_schedule("gpipe", 2, 4), routes)
    assert str(pc.advise(program, host_bandwidth=4.0)[0]).startswith("link host -> 0:")


def test_a_searched_schedule_is_certified_with_its_inputs():
    costs = {"routes": inputs(3), "host_bandwidth": 5.0}
    schedule = pc.auto_schedule(3, 6, **costs)
    timeline = pc.simulate(schedule, **costs)
    assert timeline.bound is not None
    assert timeline.bound <= timeline.makespan <= pc.simulate(pc.build_schedule("1f1b", 3, 6), **costs).makespan
    assert pc.simulate(schedule, routes=inputs(3)).bound is None


@pytest.mark.parametrize(
    "costs",
    [{"host_bandwidth": 0.0}, {"host_bandwidth": -1.0}, {"host_latency": float("nan")}, {"host_bandwidth": "fast"}],
)
def test_what_is_no_cost_is_refused(costs):
    with pytest.raises(InputError, match="host_"):
        pc.simulate(pc.build_schedule("gpipe", 2, 4), **costs)
