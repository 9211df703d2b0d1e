from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis.strategies import floats, lists, tuples

from pipecompile.ir import Kind, chain
from pipecompile.schedules.building_blocks import loop, vee
from pipecompile.schedules.search.modulo_schedule import ModuloPlacer, Reservations
from pipecompile.schedules.search.workload import Workload, unit_workload
from pipecompile.simulation.simulator import simulate
from pipecompile.verifiers import verify


def rows(workload: Workload, period: float, n_microbatches: int, delays: list[float] | None = None) -> list[str]:
    placer = ModuloPlacer(workload)
    placed = placer.place(period, delays or [0.0] * placer.n_delays)
    assert placed is not None
    return [" ".join(map(str, row)) for row in placed.schedule(workload, n_microbatches).rows]


def test_each_micro_batch_starts_a_period_after_the_one_before() -> None:
    work = unit_workload(loop(2, 2))
    assert rows(work, 3.0, 3) == [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2",
        "1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2",
    ]


def test_a_delay_moves_an_action_and_those_that_wait_for_it() -> None:
    work = unit_workload(loop(2, 2))
    placed = ModuloPlacer(work).place(4.0, [0.5, 0, 0, 1.0])
    assert placed is not None
    starts = {(kind, s): start for kind, s, start, _ in placed.actions}
    assert starts[Kind.FORWARD, 0] == 0.5
    assert starts[Kind.INPUT_GRAD, 1] == starts[Kind.FORWARD, 1] + 2.0


def test_no_schedule_has_a_period_shorter_than_a_device_is_busy() -> None:
    placer = ModuloPlacer(unit_workload(vee(2)))
    assert placer.place(6.0, [0.0] * 8) is not None
    assert placer.place(5.5, [0.0] * 8) is None


def test_a_recomputed_stage_runs_r_just_before_its_backward() -> None:
    work = replace(unit_workload(loop(2, 2)), is_recomputed=(True, False), split=False)
    placed = ModuloPlacer(work).place(4.0, [0.0] * 4)
    assert placed is not None
    schedule = placed.schedule(work, 3)
    verify(schedule, routes=chain(2))
    assert [str(a) for a in schedule.rows[0] if a and a.microbatch == 0] == ["0F0", "0R0", "0B0"]


def test_the_simulated_step_is_no_longer_than_the_plan() -> None:
    for place in (loop(4, 4), vee(3), loop(6, 2)):
        work = unit_workload(place)
        placer = ModuloPlacer(work)
        placed = placer.place(3.0 * work.n_stages / work.n_devices + 0.5, [0.0] * placer.n_delays)
        assert placed is not None
        schedule = placed.schedule(work, 7)
        verify(schedule, routes=chain(work.n_stages))
        assert simulate(schedule).makespan <= 6 * placed.period + placed.span + 1e-9


def test_a_reservation_holds_in_every_period() -> None:
    table = Reservations(4.0, 1)
    assert table.reserve(0, 1.0, 2.0) == 1.0
    assert table.reserve(0, 5.0, 1.0) == 7.0  # [5, 7) is reserved as well
    assert table.reserve(0, 10.5, 1.0) == 12.0
    assert table.reserve(0, 0.0, 0.5) is None


def test_devices_have_reservations_of_their_own_and_nothing_takes_no_room() -> None:
    table = Reservations(1.0, 2)
    assert table.reserve(0, 0.0, 1.0) == 0.0
    assert table.reserve(1, 0.0, 1.0) == 0.0
    assert table.reserve(0, 0.25, 0.0) == 0.25
    assert table.reserve(0, 0.0, 1.5) is None


@settings(max_examples=60, deadline=None)
@given(lists(tuples(floats(0, 20), floats(0.01, 2)), max_size=8))
def test_no_two_reservations_overlap_in_any_period(asked: list[tuple[float, float]]) -> None:
    table, taken = Reservations(5.0, 1), list[tuple[float, float]]()
    for earliest, seconds in asked:
        start = table.reserve(0, earliest, seconds)
        if start is not None:
            assert start >= earliest
            taken.append((start % 5.0, seconds))
    repeated = sorted((start + shift, seconds) for start, seconds in taken for shift in (0.0, 5.0))
    for (start, seconds), (following, _) in zip(repeated, repeated[1:], strict=False):
        assert start + seconds <= following + 1e-6
