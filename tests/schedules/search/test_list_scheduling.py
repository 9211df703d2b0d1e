from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from program_strategies import schedules  # noqa: F401 keeps the helpers on the path

from pipecompile.ir import Kind, Schedule
from pipecompile.schedules.building_blocks import loop, vee
from pipecompile.schedules.search.list_scheduling import ListSchedule, PriorityRule, list_schedule
from pipecompile.schedules.search.workload import Workload, unit_workload
from pipecompile.simulation.simulator import simulate
from pipecompile.verifiers import verify

NO_LIMIT = 1e9


def rule(
    n_stages: int, *, in_flight: float = NO_LIMIT, backward_first: bool = True, max_delay: float = 1.0
) -> PriorityRule:
    forward, backward = [-float(s) for s in range(n_stages)], [float(s) for s in range(n_stages)]
    first = backward if backward_first else forward
    first[:] = [rank - 1000 for rank in first]
    return PriorityRule((in_flight,) * n_stages, tuple(forward), tuple(backward), max_delay)


def listed(work: Workload, m: int, room: float, how: PriorityRule) -> tuple[ListSchedule, Schedule]:
    found = list_schedule(work, m, (room,) * work.n_devices, how)
    assert found is not None
    return found, Schedule(work.n_stages, m, work.placement, found.rows)


def test_without_limits_backwards_go_first_and_w_fill_the_time() -> None:
    _, schedule = listed(unit_workload(loop(2, 2)), 3, NO_LIMIT, rule(2))
    assert schedule.to_csv().splitlines() == [
        "0F0,0F1,0F2,0I0,0W0,0I1,0W1,0I2,0W2",
        "1F0,1I0,1F1,1I1,1F2,1I2,1W0,1W1,1W2",
    ]


def test_a_quota_holds_forwards_back() -> None:
    _, schedule = listed(unit_workload(loop(2, 2)), 3, NO_LIMIT, rule(2, in_flight=1))
    assert schedule.to_csv().splitlines() == [
        "0F0,0I0,0F1,0W0,0I1,0F2,0W1,0I2,0W2",
        "1F0,1I0,1W0,1F1,1I1,1W1,1F2,1I2,1W2",
    ]


def test_room_for_one_makes_a_micro_batch_wait_for_the_w_of_the_one_before() -> None:
    _, schedule = listed(unit_workload(loop(1, 1)), 2, 1, rule(1))
    assert schedule.to_csv() == "0F0,0I0,0W0,0F1,0I1,0W1\n"


def test_no_room_for_a_micro_batch_is_said() -> None:
    assert list_schedule(unit_workload(vee(2)), 2, (1, 2), rule(4)) is None


def test_rounding_takes_no_room() -> None:
    """100 + 58.2 - 100 - 58.2 ... is more than 0 at some time: then the next micro-batch would not fit where three may be."""
    work = replace(unit_workload(vee(2)), saved=(100.0,) * 4, weight_saved=(58.237619177225476, 60.61278703780051) * 2)
    for in_flight in (1, 2, NO_LIMIT):
        for first in (True, False):
            verify(listed(work, 20, 300.0, rule(4, in_flight=in_flight, backward_first=first))[1])


def test_patience_keeps_a_long_w_from_making_others_wait() -> None:
    """Device 0 is done with its first I at 3.5, and its second could start at 4: a W of 10 in between makes it wait."""
    work = replace(unit_workload(loop(2, 2)), forward=(1.0, 0.5), weight_grad=(10.0, 1.0))
    rows = [listed(work, 2, 2, rule(2, max_delay=max_delay))[1].rows[0] for max_delay in (1.0, 0.0)]
    assert ["".join(action.kind.value for action in row) for row in rows] == ["FFIWIW", "FFIIWW"]


def test_a_full_backward_is_one_action() -> None:
    work = replace(unit_workload(loop(2, 2)), split=False)
    found, schedule = listed(work, 2, NO_LIMIT, rule(2))
    assert {action.kind for row in schedule.rows for action in row} == {Kind.FORWARD, Kind.BACKWARD}
    assert found.seconds == simulate(schedule).makespan


@st.composite
def works(draw: st.DrawFn) -> Workload:
    n_devices = draw(st.integers(1, 4))
    n_stages = draw(st.integers(n_devices, 2 * n_devices + 1))
    places = [
        *range(n_devices),
        *draw(st.lists(st.integers(0, n_devices - 1), min_size=n_stages - n_devices, max_size=n_stages - n_devices)),
    ]
    numbers = st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=n_stages, max_size=n_stages).map(tuple)
    plain = unit_workload(draw(st.permutations(places)))
    return replace(
        plain,
        forward=draw(numbers),
        input_grad=draw(numbers),
        weight_grad=draw(numbers),
        saved=draw(numbers),
        weight_saved=(0.5,) * n_stages,
        recipe=(0.25,) * n_stages,
        is_recomputed=tuple(draw(st.lists(st.booleans(), min_size=n_stages, max_size=n_stages))),
        split=draw(st.booleans()),
    )


@settings(max_examples=150, deadline=None)
@given(
    works(),
    st.integers(1, 6),
    st.floats(1, 3),
    st.sampled_from([1, 2, NO_LIMIT]),
    st.booleans(),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_whatever_the_limits_the_schedule_is_legal_keeps_them_and_takes_the_time_said(
    work: Workload, m: int, factor: float, quota: float, first: bool, max_delay: float
) -> None:
    """The least room is one micro-batch on all stages, and one recomputed stage beside what it kept."""
    own = [[s for s in range(work.n_stages) if work.placement[s] == d] for d in range(work.n_devices)]
    keeps = [work.recipe[s] if work.is_recomputed[s] else work.saved[s] for s in range(work.n_stages)]
    least = [
        sum(keeps[s] for s in mine) + max((work.saved[s] for s in mine if work.is_recomputed[s]), default=0.0)
        for mine in own
    ]
    room = [factor * needed for needed in least]
    how = rule(work.n_stages, in_flight=quota, backward_first=first, max_delay=max_delay)
    found = list_schedule(work, m, room, how)
    assert found is not None
    schedule = Schedule(work.n_stages, m, work.placement, found.rows)
    verify(schedule)
    timeline = simulate(
        schedule,
        forward=work.forward,
        input_grad=work.input_grad,
        weight_grad=work.weight_grad,
        backward=work.backward,
        recompute=work.recompute,
        saved_bytes=work.saved,
        weight_saved_bytes=work.weight_saved if work.split else None,
        recipe_bytes=work.recipe,
    )
    assert timeline.makespan <= found.seconds + 1e-9
    assert all(peak <= most + 1e-9 for peak, most in zip(timeline.peak_memory, room, strict=True))
