from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from program_strategies import programs

from pipecompile.errors import InputError, VerifyError
from pipecompile.ir import HOST, Kind, Op, Program, Route, Schedule
from pipecompile.ir.program_text import parse_program
from pipecompile.ir.timeline import Timeline
from pipecompile.passes import lower
from pipecompile.passes.split_backward import split_backward
from pipecompile.schedules import build_schedule
from pipecompile.simulation.advice import advise
from pipecompile.simulation.forecast import forecast
from pipecompile.simulation.simulator import simulate


def draw(timeline: Timeline) -> str:
    """One line per track, one letter per unit of time; what is plain from the track is left out of the names."""
    tracks: dict[tuple[int, str], str] = {}
    for span in sorted(timeline.spans, key=lambda span: (span.device, span.track, span.start)):
        line = tracks.get((span.device, span.track), "").ljust(int(span.start))
        name = span.name[1:] if span.track == "compute" else span.name.replace("v0", "").replace("'1", "")
        tracks[span.device, span.track] = line + name[: int(span.end - span.start)].ljust(
            int(span.end - span.start), "="
        )
    return "".join(f"{device} {track:8}│{line}\n" for (device, track), line in tracks.items())


def test_copies_overlap_compute_and_queue_behind_each_other() -> None:
    timeline = simulate(build_schedule("gpipe", 2, 3), forward=2, input_grad=1, weight_grad=1, transfer=3)
    assert draw(timeline) == (
        "0 compute │F0F1F2            B0 B1 B2\n"
        "0 to 1    │  #0=#1=#2=\n"
        "1 compute │     F0 F1 F2B0B1B2\n"
        "1 to 0    │               #0=#1=#2=\n"
    )


def test_a_full_backward_takes_both_halves_and_costs_may_differ_by_stage() -> None:
    timeline = simulate(build_schedule("1f1b", 2, 2), forward=[2, 3], input_grad=[2, 1], weight_grad=1)
    assert draw(timeline) == (
        "0 compute │F0F1   B0=  B1=\n"
        "1 compute │  F0=B0F1=B1\n"
    )  # fmt: skip


def test_the_halves_of_a_split_backward_take_their_own_time() -> None:
    timeline = simulate(split_backward(build_schedule("1f1b", 2, 1), 0), forward=2, input_grad=3, weight_grad=2)
    assert draw(timeline) == (
        "0 compute │F0     I0=W0\n"
        "1 compute │  F0I0=W0\n"
    )  # fmt: skip


def test_seconds_of_a_transfer_go_by_route_and_a_gradient_costs_as_much() -> None:
    routes = (Route("a", 0, (1, 2)), Route("b", 1, (2,)), Route("x", HOST, (0,)), Route("y", 2, (HOST,)))
    program = lower(build_schedule("gpipe", 3, 1), routes)
    timeline = simulate(program, transfer={"a": 4, "b": 0, "x": 100, "y": 100})
    copies = [(s.device, s.track, s.name, s.start, s.end) for s in timeline.spans if s.track != "compute"]
    assert copies == [
        (0, "to 1", "a#0", 1.0, 5.0),
        (0, "to 2", "a#0", 1.0, 5.0),
        (2, "to 0", "a'2#0", 9.0, 13.0),
        (1, "to 0", "a'1#0", 11.0, 15.0),
    ]


def test_stages_on_one_device_pay_for_no_transfer() -> None:
    schedule = build_schedule("gpipe", 4, 3, n_devices=1)
    assert simulate(schedule, transfer=50).makespan == 4 * 3 * 3
    assert simulate(schedule, transfer=50).bubble == 0


def test_a_transfer_takes_its_time_its_latency_and_its_bytes_over_the_bandwidth_of_the_pair() -> None:
    routes = (Route("a", 0, (1, 2), 100.0),)
    program = lower(build_schedule("forward", 3, 1), routes)
    latency = {(a, b): 1.0 if b == 1 else 2.0 for a in range(3) for b in range(3) if a != b}
    bandwidth = {pair: 50.0 if pair == (0, 1) else 10.0 for pair in latency}
    timeline = simulate(program, transfer={"a": 0.5}, latency=latency, bandwidth=bandwidth)
    copies = {span.track: (span.start, span.end) for span in timeline.spans if span.track != "compute"}
    assert copies == {"to 1": (1.0, 1.0 + 0.5 + 1.0 + 2.0), "to 2": (1.0, 1.0 + 0.5 + 2.0 + 10.0)}


#   stages 0, 1 on device 0 and 2, 3 on devices 1, 2: both values leave device 0; stage 3 gets one from device 1, too
FAN = (Route("a", 0, (2,)), Route("b", 0, (3,)), Route("c", 2, (3,)))


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        ("pair", [("to 1", "a#0", 1, 4), ("to 2", "b#0", 1, 4), ("to 2", "c#0", 5, 8)]),
        ("device", [("to 1", "a#0", 1, 4), ("to 2", "b#0", 4, 7), ("to 2", "c#0", 7, 10)]),
    ],
)
def test_copies_queue_for_the_way_between_two_devices_or_for_the_engines_of_both(
    engines: str, expected: list[tuple[str, str, int, int]]
) -> None:
    schedule = Schedule.from_rows([["0F0", "1F0"], ["2F0"], ["3F0"]])
    timeline = simulate(lower(schedule, FAN), transfer=3, engines=engines)
    assert [(s.track, s.name, s.start, s.end) for s in timeline.spans if s.track != "compute"] == expected
    assert timeline.makespan == expected[-1][-1] + 1


@given(
    st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 6), st.integers(1, 8), st.tuples(*[st.integers(0, 9)] * 3)
)  # fmt: skip
def test_makespan_of_equal_stages_is_the_formula(name: str, p: int, m: int, costs: tuple[int, int, int]) -> None:
    f, i, w = costs
    timeline = simulate(build_schedule(name, p, m), forward=f, input_grad=i, weight_grad=w)
    assert timeline.makespan == (m + p - 1) * (f + i + w)
    assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1) if f + i + w else 0.0)
    forward = simulate(build_schedule("forward", p, m), forward=f)
    assert forward.makespan == (m + p - 1) * f
    assert forward.peak_in_flight == (0.0,) * p


def test_memory_of_a_small_program_step_by_step() -> None:
    routes = (Route("x", HOST, (0,), 100.0), Route("v0", 0, (1,), 10.0))
    timeline = simulate(lower(build_schedule("gpipe", 2, 1), routes), transfer=2.0, saved_bytes=[1000.0, 2000.0])
    assert timeline.memory == (
        (
            (0.0, 1110.0),  # x is there, 0F0 makes v0 and saves
            (1.0, 1010.0),  # x is freed
            (3.0, 1000.0),  # v0 is freed when its transfer ends
            (6.0, 1010.0),  # the gradient of v0 starts to arrive
            (8.0, 1110.0),  # 0B0 makes the gradient of x
            (10.0, 0.0),
        ),
        (
            (1.0, 10.0),  # v0 starts to arrive
            (3.0, 2010.0),  # 1F0 saves; at 4 its gradient takes the place of v0
            (6.0, 10.0),
            (8.0, 0.0),
        ),
    )


def test_what_i_leaves_for_w_takes_the_place_of_what_was_saved() -> None:
    schedule = Schedule.from_csv("0F0,0I0,0W0\n")
    for subject in (schedule, lower(schedule)):
        timeline = simulate(subject, saved_bytes=100.0, weight_saved_bytes=30.0, parameter_bytes=7.0)
        assert timeline.memory == (((0.0, 107.0), (2.0, 37.0), (3.0, 7.0)),)
        assert simulate(subject, saved_bytes=100.0).memory == (((0.0, 100.0), (3.0, 0.0)),)


def test_a_forward_that_is_run_again_keeps_its_inputs_and_the_way_back() -> None:
    routes = (Route("x", HOST, (0,), 5.0, gradient=False),)
    schedule = Schedule.from_csv("0F0,0F1,0R0,0B0,0R1,0B1\n")
    timeline = simulate(lower(schedule, routes), recompute=2.0, saved_bytes=100.0, recipe_bytes=1.0)
    assert timeline.memory == (
        (
            (0.0, 6.0),  # x#0 and the way back to 0F0
            (1.0, 12.0),  # and of 0F1
            (2.0, 112.0),  # 0R0 saves
            (4.0, 106.0),  # x#0 and its way back are not needed any more; at 6, 0B0 frees what 0R1 saves anew
            (8.0, 100.0),
            (10.0, 0.0),
        ),
    )


def test_peak_in_flight_counts_a_stage_as_its_share_of_the_device() -> None:
    assert simulate(build_schedule("gpipe", 4, 3, n_devices=2)).peak_in_flight == (3.0, 3.0)
    assert simulate(split_backward(build_schedule("1f1b", 3, 4), 100)).peak_in_flight == (4.0, 4.0, 4.0)


PRICES = st.integers(0, 5).map(float)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs(max_stages=5, max_microbatches=4), st.data())
def test_every_start_is_the_earliest_that_a_fixed_point_finds(program: Program, data: st.DataObject) -> None:
    per_stage = st.lists(PRICES, min_size=program.n_stages, max_size=program.n_stages)
    forward, input_grad, weight_grad, recompute = (data.draw(per_stage) for _ in range(4))
    transfer = {name: data.draw(PRICES) for name in [r.value for r in program.routes] + [t.name for t in program.ties]}
    links = {(a, b): data.draw(PRICES) for a in range(program.n_devices) for b in range(program.n_devices) if a != b}
    timeline = simulate(
        program,
        forward=forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        recompute=recompute,
        transfer=transfer,
        latency=links,
    )
    costs = {
        Kind.FORWARD: forward,
        Kind.INPUT_GRAD: input_grad,
        Kind.WEIGHT_GRAD: weight_grad,
        Kind.RECOMPUTE: recompute,
    }
    costs[Kind.BACKWARD] = [i + w for i, w in zip(input_grad, weight_grad, strict=True)]
    found = {(span.device, span.track, span.name): (span.start, span.end) for span in timeline.spans}
    expected = fixed_point(program, costs, lambda name, a, b: transfer[name] + links[a, b])
    copies = {key for key, (start, end) in expected.items() if key[1] != "compute" and start == end}
    assert found == {key: times for key, times in expected.items() if key not in copies}
    assert_critical(timeline)


def assert_critical(timeline: Timeline) -> None:
    """The chain begins at the beginning, ends at the end, and has no holes."""
    path = timeline.critical_path
    assert sum(span.end - span.start for span in path) == pytest.approx(timeline.makespan)
    assert all(a.end == b.start for a, b in pairwise(path))
    assert set(path) <= set(timeline.spans)


def fixed_point(
    program: Program, costs: dict[Kind, list[float]], delay: Callable[[str, int, int], float]
) -> dict[tuple[int, str, str], tuple[float, float]]:
    """All spans, by repeating every constraint until nothing moves."""
    spans: dict[tuple[int, str, str], tuple[float, float]] = {}
    arrival: dict[tuple[object, int], float] = {}
    before: object = None

    def leave(device: int, peer: int, what: object, name: str, clock: float, tracks: dict[int, float]) -> None:
        seconds = delay(name, device, peer)
        start = max(clock, tracks[peer]) if seconds else clock
        arrival[what, peer] = start + seconds
        tracks[peer] = start + seconds if seconds else tracks[peer]
        spans[device, f"to {peer}", str(what)] = start, start + seconds

    while before != (before := (dict(spans), dict(arrival))):
        for device, row in enumerate(program.rows):
            clock, tracks = 0.0, dict.fromkeys(range(program.n_devices), 0.0)
            for each in row:
                if each.op is Op.COMPUTE and each.action:
                    start = max([clock, *(arrival.get((o.value, device), 0.0) for o in each.reads)])
                    clock = start + costs[each.action.kind][each.action.stage]
                    spans[device, "compute", str(each.action)] = start, clock
                if each.op is Op.SEND and each.peer is not None and each.peer != HOST:
                    value = each.reads[0].value
                    leave(device, each.peer, value, value.name, clock, tracks)
                if each.op in (Op.BROADCAST, Op.REDUCE):
                    tie = next(tie for tie in program.ties if tie.name == each.tie)
                    home, *copies = tie.devices(program.placement)
                    givers = [home] if each.op is Op.BROADCAST else copies
                    takers = copies if each.op is Op.BROADCAST else [home]
                    if device in givers:
                        for taker in takers:
                            leave(device, taker, str(each), tie.name, clock, tracks)
                            arrival[(str(each), device), taker] = arrival.pop((str(each), taker))
                    else:
                        clock = max([clock, *(arrival.get(((str(each), giver), device), 0.0) for giver in givers)])
    return spans


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs(max_stages=5, max_microbatches=4), PRICES, PRICES)
def test_memory_is_never_negative_and_all_given_back(program: Program, transfer: float, kept: float) -> None:
    for curve in simulate(program, transfer=transfer, saved_bytes=kept).memory:
        times, sizes = [time for time, _ in curve], [size for _, size in curve]
        assert times == sorted(set(times))
        assert min(sizes, default=0) >= 0
        assert not sizes or sizes[-1] == 0


def test_without_transfers_the_peak_is_what_is_saved_for_the_micro_batches_in_flight() -> None:
    for name in ("gpipe", "1f1b"):
        timeline = simulate(build_schedule(name, 4, 6), saved_bytes=7.0)
        assert timeline.peak_memory == tuple(7.0 * count for count in timeline.peak_in_flight)


def test_a_schedule_that_is_not_legal_is_refused() -> None:
    with pytest.raises(VerifyError, match="deadlock"):
        simulate(Schedule.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B1,1B0\n"))


def test_a_program_that_cannot_end_is_refused_with_what_is_wrong() -> None:
    text = str(lower(build_schedule("gpipe", 2, 1)))
    with pytest.raises(VerifyError, match="never sent, received once"):
        simulate(parse_program(text.replace("  SEND v0#0[0] to 1\n", "")))


def test_costs_that_are_not_numbers_are_refused() -> None:
    with pytest.raises(InputError, match="forward has 1 number for 2 stages"):
        simulate(build_schedule("gpipe", 2, 1), forward=[1.0])


SENT_TWICE = """program: 4 stages on devices 0 1 0 1, 3 micro-batches
route v0: 0 -> 1, 0 bytes, gradient
route v1: 1 -> 2, 0 bytes, gradient
route v2: 2 -> 3, 0 bytes, gradient
device 0
  0F0 -> v0#0[0] @0#0[0]
  SEND v2#2[0] to 1
  RECV v2'3#0[0] from 1
  2B0 @2#0[0] v2'3#0[0] -> v1'2#0[0]
  SEND v2#2[0] to 1
device 1
  RECV v2#2[0] from 0
  3F2 v2#2[0] -> @3#2[2]
  SEND v2'3#0[0] to 0
"""


@pytest.mark.parametrize("call", [simulate, advise, lambda program: forecast(program, contention=0.5)])
def test_a_value_that_is_sent_twice_is_a_fault(call: Callable[[Program], object]) -> None:
    """Device 1 answers the first SEND, and device 0 sends again after the answer: the causes went in a circle, without an end."""
    with pytest.raises(VerifyError, match="v2#2 from device 0 to device 1: sent 2 times, received once"):
        call(parse_program(SENT_TWICE))
