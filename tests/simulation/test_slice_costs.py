"""Costs of slices: shares are checked, and a simulation of slices is that of as many smaller micro-batches."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from sliced_schedules import SLICED, random_sliced

import pipecompile as pc
from pipecompile.errors import InputError, ScheduleError
from pipecompile.ir import HOST, SHARDING, Action, Kind, Route, Schedule, chain
from pipecompile.simulation.calibration import calibrate
from pipecompile.simulation.costs import cost_fingerprint, make_costs
from pipecompile.simulation.simulator import simulate
from pipecompile.simulation.slice_costs import make_slice_costs

TWO = Schedule.from_csv("0F0.0,0F0.1,0B0.1,0B0.0\n1F0.0,1F0.1,1B0.1,1B0.0\n")


def test_shares_are_equal_by_default_and_none_for_whole_micro_batches() -> None:
    assert make_slice_costs(1, {}) is None
    costs = make_slice_costs(4, {})
    assert costs is not None
    assert costs.seconds == costs.bytes == (0.25,) * 4
    assert (costs.of_seconds(-1), costs.of_bytes(3)) == (1.0, 0.25)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"slice_seconds": [0.5]}, r"slice_seconds has 1 number for 2 slices\n  try    slice_seconds=\[0.5, 0.5\]"),
        (
            {"slice_bytes": [1, 3]},
            r"slice_bytes sums to 4\n.*shares of a micro-batch\n  try    slice_bytes=\[0.25, 0.75\]",
        ),
        (
            {"slice_bytes": 0.5},
            r"slice_bytes=0.5 is not a list with a share per slice\n  try    slice_bytes=\[0.5, 0.5\]",
        ),
        ({"slice_bytes": "ab"}, "slice_bytes='ab' is not a list with a share per slice"),
        ({"slice_seconds": [1, 0]}, r"slice_seconds\[1\]=0 is not a finite number above 0"),
        ({"slice_seconds": [1.5, -0.5]}, r"slice_seconds\[1\]=-0.5 is not a finite number"),
        ({"slice_seconds": [float("nan"), 1]}, r"slice_seconds\[0\]=nan is not a finite number"),
        ({"slice_seconds": ["a", 1]}, r"slice_seconds\[0\]='a' is not"),
        ({"overlap": 1.0}, "overlap is given for a schedule of slices\n.*\n  try    forward_communication="),
        ({"slices": 2}, "the cost 'slices' is not known"),
    ],
)
def test_what_are_no_shares_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        simulate(TWO, **arguments)


def test_shares_of_whole_micro_batches_are_refused() -> None:
    for name in ("slice_seconds", "slice_bytes"):
        with pytest.raises(InputError, match=f"{name} is given without slices"):
            simulate(pc.build_schedule("1f1b", 2, 2), **{name: [1.0]})
        with pytest.raises(InputError, match=f"{name} is given without slices"):
            pc.simulate_periodic(pc.build_periodic("1f1b", 2, 20), **{name: [1.0]})


def test_the_fingerprint_has_the_shares() -> None:
    routes = chain(2)
    costs = [make_costs(2, 2, routes, (), count) for count in (1, 2, 4)]
    costs.append(make_costs(2, 2, routes, (), 2, slice_bytes=[0.25, 0.75]))
    assert len({cost_fingerprint(each, routes) for each in costs}) == 4


def test_later_slices_may_take_longer_and_save_less() -> None:
    shares = {"slice_seconds": [0.25, 0.75], "slice_bytes": [0.75, 0.25]}
    routes = (replace(chain(2)[0], nbytes=8.0),)
    timeline = simulate(
        TWO,
        routes=routes,
        forward=4.0,
        backward=8.0,
        saved_bytes=100.0,
        transfer=4.0,
        bandwidth=8.0,
        latency=1.0,
        **shares,
    )
    spans = {span.name: span for span in timeline.spans}
    assert [spans[f"0F0.{place}"].end - spans[f"0F0.{place}"].start for place in (0, 1)] == [1.0, 3.0]
    assert [spans[f"0B0.{place}"].end - spans[f"0B0.{place}"].start for place in (0, 1)] == [2.0, 6.0]
    assert spans["v0#0.0"].end - spans["v0#0.0"].start == pytest.approx(0.75 * 4 + 1.0 + 0.75)
    assert spans["v0'1#0.1"].end - spans["v0'1#0.1"].start == pytest.approx(0.25 * 4 + 1.0 + 0.25)
    assert dict(timeline.memory[0])[1.0] == 100.0
    assert timeline.peak_memory == (100.0, 100.0)
    assert timeline.peak_in_flight == (2.0, 2.0)


def as_micro_batches(schedule: Schedule) -> Schedule:
    """Return the schedule in which each slice is a micro-batch of its own."""

    def one(action: Action) -> Action:
        return action if action.kind in SHARDING else Action(action.stage, action.kind, action.unit(schedule.n_slices))

    rows = tuple(tuple(map(one, row)) for row in schedule.rows)
    overlaps = frozenset((one(first), one(second)) for first, second in schedule.overlaps)
    return replace(schedule, n_microbatches=schedule.n_units, n_slices=1, rows=rows, overlaps=overlaps)


BYTES = ("saved_bytes", "weight_saved_bytes", "recipe_bytes")
SECONDS = (
    "forward", "input_grad", "weight_grad", "backward", "recompute", "forward_communication", "backward_communication", "transfer",
)  # fmt: skip
FIXED = ("latency", "bandwidth", "host_latency", "host_bandwidth", "launch")


@pytest.mark.parametrize("seed", range(80))
def test_slices_are_as_many_smaller_micro_batches(seed: int) -> None:
    """Of equal shares: times, memory and names of all spans."""
    rng = Random(seed)
    schedule = random_sliced(rng)
    n = schedule.n_slices
    if any(action.kind is Kind.OFFLOAD for row in schedule.rows for action in row):
        return  # a backward of slices waits for more copies
    costs = {name: rng.uniform(1, 3) for name in (*SECONDS[:5], *BYTES, "transfer") if rng.random() < 0.7}
    costs |= {
        name: rng.uniform(0, 0.9) for name in ("forward_communication", "backward_communication") if rng.random() < 0.3
    }
    fixed = {name: rng.uniform(0.1, 2) for name in FIXED if rng.random() < 0.4}
    routes = (*(replace(each, nbytes=4.0) for each in chain(schedule.n_stages)), Route("x", HOST, (0,), 2.0))
    whole = tuple(replace(each, nbytes=each.nbytes / n) for each in routes)
    options: dict[str, Any] = {"engines": rng.choice(["pair", "device"])}
    sliced = simulate(schedule, routes=routes, **costs, **fixed, **options)
    smaller = {name: value / n for name, value in costs.items()}
    for name, default in (("forward", 1.0), ("input_grad", 1.0), ("weight_grad", 1.0)):
        smaller.setdefault(name, default / n)
    units = simulate(as_micro_batches(schedule), routes=whole, **smaller, **fixed, **options)
    assert sliced.makespan == pytest.approx(units.makespan)
    assert sliced.peak_memory == pytest.approx(units.peak_memory)
    assert sliced.peak_in_flight == units.peak_in_flight
    assert len(sliced.spans) == len(units.spans)
    ends = sorted(span.end for span in units.spans)
    assert sorted(span.end for span in sliced.spans) == pytest.approx(ends)


FIRST, LAST = "0F0.0,0F0.1,0OFFLOAD0.0", "0B1.1,0B1.0,0RELOAD0.0,0B0.1,0B0.0"


def test_a_backward_waits_for_the_copies_back_of_all_earlier_slices() -> None:
    schedule = Schedule.from_csv("0F0.0,0F0.1,0OFFLOAD0.0,0RELOAD0.0,0B0.1,0B0.0")
    timeline = simulate(schedule, offload=4.0, saved_bytes=8.0, slice_bytes=[0.75, 0.25])
    spans = {span.name: span for span in timeline.spans}
    assert spans["@0.h#0.0"].end - spans["@0.h#0.0"].start == spans["@0#0.0"].end - spans["@0#0.0"].start == 3.0
    assert spans["0B0.1"].start == spans["@0#0.0"].end == 7.0
    assert timeline.peak_memory == (8.0,)
    between = simulate(
        replace(schedule, rows=Schedule.from_csv(f"{FIRST},0F1.0,0F1.1,{LAST}").rows, n_microbatches=2), saved_bytes=8.0
    )
    assert between.peak_memory == (12.0,), "half of the first micro-batch is on the host"


@pytest.mark.parametrize("name", SLICED)
def test_more_slices_take_less_time_and_memory_and_gpipe_the_same_memory(name: str) -> None:
    steps = [simulate(pc.build_schedule(name, 4, 4, n_slices=count), saved_bytes=12.0) for count in (1, 2, 3, 4)]
    assert [step.makespan for step in steps] == sorted((step.makespan for step in steps), reverse=True)
    peaks = [max(step.peak_memory) for step in steps]
    assert peaks == ([48.0] * 4 if name == "terapipe" else sorted(peaks, reverse=True))


def test_advice_and_forecasts_know_slices() -> None:
    schedule = pc.build_schedule("seq1f1b", 3, 4, n_slices=2)
    forward = [1.0, 1.0, 2.0]
    assert pc.advise(schedule, forward=forward, slice_seconds=[0.4, 0.6])[0].place == 2
    assert pc.forecast(schedule, forward=forward).seconds == simulate(schedule, forward=forward).makespan
    with pytest.raises(InputError, match=r"the timeline has 0F0.0, an action on a slice"):
        calibrate(simulate(schedule))


def test_limits_of_what_is_in_flight_count_slices() -> None:
    schedule = pc.build_schedule("seq1f1b", 3, 4, n_slices=2)
    pc.verify(schedule, in_flight=4)
    with pytest.raises(pc.VerifyError, match="device 0 has 4 slices in flight, 3 are allowed"):
        pc.verify(schedule, in_flight=3)


def test_a_number_of_slices_is_for_schedules_that_have_them() -> None:
    with pytest.raises(ScheduleError, match="1f1b has no slices\n  why    n_slices=2\n  try    one of 'seq1f1b'"):
        pc.build_schedule("1f1b", 2, 2, n_slices=2)
    assert pc.build_schedule("1f1b", 2, 2, n_slices=1) == pc.build_schedule("1f1b", 2, 2)
