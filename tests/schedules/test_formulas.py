"""The makespans and peaks that the builders' docstrings promise."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipecompile.ir import Kind, Schedule
from pipecompile.ir.in_flight import in_flight
from pipecompile.schedules import build_schedule
from pipecompile.simulation.simulator import simulate

TIMES = st.tuples(*[st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0])] * 3)
DEVICES, CHUNKS = st.integers(1, 6), st.integers(1, 3)


def makespan(schedule: Schedule, times: tuple[float, float, float]) -> float:
    """All stages of a device together take `times`."""
    share = schedule.n_devices / schedule.n_stages
    forward, input_grad, weight_grad = (time * share for time in times)
    return simulate(schedule, forward=forward, input_grad=input_grad, weight_grad=weight_grad).makespan


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b"])
@settings(max_examples=25, deadline=None)
@given(p=DEVICES, m=st.integers(1, 12), times=TIMES)
def test_one_stage_per_device(name: str, p: int, m: int, times: tuple[float, float, float]) -> None:
    schedule = build_schedule(name, p, m)
    assert makespan(schedule, times) == pytest.approx((m + p - 1) * sum(times))
    most = {"gpipe": [m] * p, "1f1b": range(p, 0, -1), "eager-1f1b": range(2 * p - 1, 0, -2)}[name]
    assert in_flight(schedule.rows, schedule.placement) == tuple(min(m, count) for count in most)


@settings(max_examples=15, deadline=None)
@given(p=st.integers(2, 6), m=st.integers(1, 12))
def test_eager_1f1b_hides_transfers_of_half_a_backward(p: int, m: int) -> None:
    assert simulate(build_schedule("eager-1f1b", p, m), transfer=1.0).makespan == 3 * (m + p - 1) + 2 * (p - 1)
    late = simulate(build_schedule("1f1b", p, m), transfer=1.0).makespan
    assert late >= 3 * (m + p - 1) + 2 * (p - 1)


@pytest.mark.parametrize("name", ["looped-bfs", "interleaved"])
@settings(max_examples=25, deadline=None)
@given(p=DEVICES, v=CHUNKS, more=st.integers(0, 9), times=TIMES)
def test_several_stages_divide_the_bubble(
    name: str, p: int, v: int, more: int, times: tuple[float, float, float]
) -> None:
    m = p + more
    schedule = build_schedule(name, p * v, m, n_devices=p)
    assert makespan(schedule, times) == pytest.approx(m * sum(times) + (p - 1) * sum(times) / v)
    peaks = in_flight(schedule.rows, schedule.placement)
    if name == "looped-bfs":
        assert peaks == (m,) * p
    elif v > 1:
        longest = -(-m // (m // p))
        assert peaks == pytest.approx([min(m, ((v - 1) * longest + 2 * (p - d) - 1) / v) for d in range(p)])


@settings(max_examples=40, deadline=None)
@given(p=DEVICES, v=CHUNKS, rounds=st.integers(1, 3), times=TIMES)
def test_zb_h1_fills_the_bubble_with_w(p: int, v: int, rounds: int, times: tuple[float, float, float]) -> None:
    f, i, w = times
    assume(w <= min(f, i))
    m = rounds * p
    for schedule in (build_schedule("zb-h1", p, m), build_schedule("interleaved-zb", p * v, m, n_devices=p)):
        chunks = schedule.n_stages // p
        assert makespan(schedule, times) == pytest.approx(m * sum(times) + (p - 1) * (f + i - w) / chunks)
        assert max(in_flight(schedule.rows, schedule.placement)) <= ((chunks - 1) * p + p) / chunks
    until_i = in_flight(build_schedule("zb-h1", p, m).rows, range(p), until=Kind.INPUT_GRAD)
    assert until_i == tuple(range(p, 0, -1))


@settings(max_examples=40, deadline=None)
@given(p=DEVICES, more=st.integers(0, 9), times=TIMES)
def test_zb_h2_never_waits(p: int, more: int, times: tuple[float, float, float]) -> None:
    f, i, w = times
    assume(i <= min(f, w))
    m = 2 * p - 1 + more
    schedule = build_schedule("zb-h2", p, m)
    assert makespan(schedule, times) == pytest.approx(m * sum(times) + (p - 1) * f)
    timeline = simulate(schedule)
    assert timeline.spans_of_devices == (3.0 * m,) * p
    assert max(timeline.peak_in_flight) <= 2 * p - 1
    assert in_flight(schedule.rows, range(p), until=Kind.INPUT_GRAD) == tuple(range(2 * p - 1, 0, -2))


@pytest.mark.parametrize("p", range(1, 9))
@pytest.mark.parametrize("more", [0, 1, 5])
def test_vs_at_equal_times(p: int, more: int) -> None:
    """(name, the micro-batches from which on it holds, what is beyond M T, most in flight)"""
    half = 0.5 * (p - 1) if p <= 2 else (3 * p - 7) / 2 if p % 2 == 0 else (3 * p - 4) / 2
    third = 0.0 if p == 1 else (4 * p - 5) / 2 if p % 3 else (4 * p - 7) / 2
    promises = [
        ("zbv", 2 * p - 1, (p - 1) / 2, p),
        ("v-half", 2 * p, half, p // 2 + 1),
        ("v-min", 2, third, (p + 1) // 3 + 1),
        ("dualpipev", 2 * p, (p - 1) / 2, p + 0.5),
    ]
    for name, least, beyond, most in promises:
        m = least + more
        schedule = build_schedule(name, 2 * p, m)
        timeline = simulate(schedule, forward=0.5, input_grad=0.5, weight_grad=0.5)
        assert timeline.makespan == 3 * m + beyond, name
        assert max(timeline.peak_in_flight) <= most, name
        if name == "zbv":
            assert timeline.spans_of_devices == (3.0 * m,) * p
