from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program_strategies import catalogue_schedules

from pipecompile.ir import Kind, Schedule, chain
from pipecompile.schedules import build_schedule
from pipecompile.schedules.building_blocks import loop
from pipecompile.schedules.search import makespan_bound
from pipecompile.schedules.search.makespan_bound import host_lower_bound, makespan_lower_bound, one_machine_bound
from pipecompile.schedules.search.workload import make_workload, unit_workload
from pipecompile.simulation.costs import make_costs
from pipecompile.simulation.simulator import simulate


@pytest.mark.parametrize(("p", "v", "m"), [(1, 1, 1), (2, 1, 4), (4, 2, 8), (8, 1, 16), (3, 3, 9)])
def test_equal_stages_have_the_bound_of_the_books(p: int, v: int, m: int) -> None:
    assert makespan_lower_bound(unit_workload(loop(p * v, p)), m) == v * 3 * m + p - 1


def test_few_micro_batches_wait_for_the_first_to_come_back() -> None:
    """Two micro-batches on four stages: the last gradient gets to stage 0 after 4 F and 3 I, then 2 I and 2 W are left."""
    assert makespan_lower_bound(unit_workload(loop(4, 4)), 2) == 7 + 4


def test_memory_for_one_makes_micro_batches_go_one_after_the_other() -> None:
    work = unit_workload(loop(4, 4))
    assert makespan_lower_bound(work, 3, (1.0,) * 4) == 3 * 9
    assert makespan_lower_bound(work, 3, (2.0,) * 4) == 2 * 9
    assert makespan_lower_bound(replace(work, saved=(0.0,) * 4), 3, (1.0,) * 4) == makespan_lower_bound(work, 3)


@settings(max_examples=60, deadline=None)
@given(catalogue_schedules())
def test_no_schedule_of_the_catalogue_is_shorter(schedule: Schedule) -> None:
    if all(action.kind is Kind.FORWARD for row in schedule.rows for action in row):
        return
    timeline = simulate(schedule)
    work = unit_workload(schedule.placement)
    held = [peak * schedule.placement.count(d) for d, peak in enumerate(timeline.peak_in_flight)]
    assert makespan_lower_bound(work, schedule.n_microbatches, held) <= timeline.makespan


def test_memory_that_w_holds_delays_the_next_forward() -> None:
    """Room for one micro-batch and a fifth: half of one waits for W, so every forward of a device waits for the W before."""
    work = replace(unit_workload(loop(3, 3)), saved=(1.0,) * 3, weight_saved=(0.5,) * 3)
    assert makespan_lower_bound(work, 4, (1.2,) * 3) == 4 * 7.0


def test_of_a_large_problem_the_choices_of_the_tightest_devices_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages on two devices. Device 1 has room for one micro-batch: it recomputes each, or waits for it."""
    work = replace(unit_workload(loop(2, 2)), recipe=(0.1, 0.1), recompute=(3.0, 3.0))
    capacity = (8.0, 1.2)
    free, whole = (
        makespan_lower_bound(replace(work, saved=(0.1, 0.1)), 8, capacity),
        makespan_lower_bound(work, 8, capacity, recompute=True),
    )
    assert free < whole

    def limited(cells: int) -> float:
        monkeypatch.setattr(makespan_bound, "_CHOICE_CELLS", cells)
        makespan_bound._cached_bound.cache_clear()
        return makespan_lower_bound(work, 8, capacity, recompute=True)

    assert limited(2 * 2 * 8) == whole
    assert limited(0) == free
    makespan_bound._cached_bound.cache_clear()


def test_an_urgent_action_interrupts_another() -> None:
    """The first runs for 2 seconds, the urgent one from 2 to 3, the rest of the first until 6; the tail of 9 decides."""
    assert one_machine_bound([(0.0, 5.0, 1.0), (2.0, 1.0, 9.0)]) == 12.0
    assert one_machine_bound([(0.0, 5.0, 8.0), (2.0, 1.0, 9.0)]) == 14.0
    assert one_machine_bound([]) == 0.0


_JOBS = st.lists(st.tuples(*(st.integers(0, 9).map(float),) * 3), min_size=1, max_size=5)


@given(_JOBS)
def test_no_order_is_shorter(jobs: list[tuple[float, float, float]]) -> None:
    assert one_machine_bound(jobs) <= min(_makespan(order) for order in permutations(jobs))


def _makespan(order: tuple[tuple[float, float, float], ...]) -> float:
    now = longest = 0.0
    for head, seconds, tail in order:
        now = max(now, head) + seconds
        longest = max(longest, now + tail)
    return longest


def bound(recompute: bool = False, is_recomputed: tuple[bool, bool] = (False, False), **costs: object) -> float:
    checked = make_costs(2, 2, chain(2), **costs)  # type: ignore[arg-type]
    workload = make_workload(loop(2, 2), chain(2), checked, is_recomputed=is_recomputed)
    return host_lower_bound(workload, 5, checked, recompute=recompute)


def test_without_launches_and_shared_streams_it_is_0() -> None:
    assert bound() == 0.0
    assert bound(streams=[0, 1]) == 0.0


def test_one_thread_launches_for_all_devices_or_one_for_each() -> None:
    assert bound(launch=[1.0, 2.0]) == 5 * 3 * (1.0 + 2.0)
    assert bound(launch=[1.0, 2.0], hosts="device") == 5 * 3 * 2.0


def test_a_recomputed_stage_is_launched_once_more_where_it_has_to_be_recomputed() -> None:
    assert bound(launch=1.0, is_recomputed=(True, False)) == 5 * 7.0
    assert bound(launch=1.0, is_recomputed=(True, False), recompute=True) == 5 * 6.0


def test_devices_on_one_stream_compute_one_after_another() -> None:
    assert bound(streams=[3, 3]) == 5 * 2 * 3.0


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2", "2bp"])
@pytest.mark.parametrize("hosts", ["one", "device"])
def test_no_schedule_with_launches_and_shared_streams_is_shorter(name: str, hosts: str) -> None:
    costs = {"launch": [1.5, 2.0], "hosts": hosts, "streams": [0, 0]}
    assert simulate(build_schedule(name, 2, 5), **costs).makespan >= bound(**costs)  # type: ignore[arg-type]
