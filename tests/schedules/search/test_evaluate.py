from __future__ import annotations

from math import inf
from typing import Any

import pytest

from pipecompile.ir import Action, Route, Schedule, chain
from pipecompile.passes import lower
from pipecompile.schedules import build_schedule
from pipecompile.schedules.building_blocks import loop, vee
from pipecompile.schedules.search.evaluate import Evaluator, MemoryLimit
from pipecompile.simulation.costs import make_costs
from pipecompile.simulation.simulator import simulate

BYTES: dict[str, Any] = {
    "saved_bytes": [100.0, 50.0],
    "weight_saved_bytes": [30.0, 20.0],
    "recipe_bytes": 1.0,
    "parameter_bytes": [7.0, 5.0],
}


def evaluator(limit: MemoryLimit | None, routes: tuple[Route, ...] = chain(2)) -> Evaluator:
    return Evaluator(loop(2, 2), routes, make_costs(2, 2, routes, **BYTES), limit)


def in_bytes(*capacity: float) -> MemoryLimit:
    return MemoryLimit(capacity, in_bytes=True)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_seconds_and_peaks_are_those_of_the_simulator(name: str) -> None:
    schedule = build_schedule(name, 2, 3)
    timeline = simulate(schedule, **BYTES)
    judged = evaluator(in_bytes(1e9, 1e9))
    assert judged.seconds(schedule) == timeline.makespan
    assert judged.peaks(schedule) == timeline.peak_memory


def test_buffers_of_values_count_as_in_the_lowered_program() -> None:
    routes = (Route("v0", 0, (1,), 9.0),)
    schedule = build_schedule("1f1b", 2, 3)
    judged = evaluator(in_bytes(1e9, 1e9), routes)
    assert judged.peaks(schedule) == simulate(lower(schedule, routes), **BYTES).peak_memory
    assert judged.peaks(schedule) > evaluator(in_bytes(1e9, 1e9)).peaks(schedule)


def test_excess_is_zero_exactly_for_what_fits() -> None:
    """1F1B holds two micro-batches on device 0 and one on device 1, beside the parameters."""
    schedule = build_schedule("1f1b", 2, 3)
    assert evaluator(None).excess(schedule) == (0.0, 0.0)
    assert evaluator(in_bytes(207.0, 55.0)).excess(schedule) == (0.0, 0.0)
    assert evaluator(in_bytes(200.0, 50.0)).excess(schedule) == (7.0, 5.0)
    assert evaluator(MemoryLimit((2.0, 1.0), in_bytes=False)).excess(schedule) == (0.0, 0.0)
    assert evaluator(MemoryLimit((1.0, 1.0), in_bytes=False)).excess(schedule) == (1.0, 0.0)


def test_the_buffers_of_values_alone_can_exceed_the_limit() -> None:
    routes = (Route("v0", 0, (1,), 9.0),)
    schedule = build_schedule("1f1b", 2, 3)
    assert max(evaluator(in_bytes(207.0, 55.0), routes).excess(schedule)) > 0


def test_capacity_is_what_parameters_leave() -> None:
    assert evaluator(None).capacity == (inf, inf)
    assert evaluator(in_bytes(100.0, 90.0)).capacity == (93.0, 85.0)
    assert evaluator(MemoryLimit((2.0, 1.0), in_bytes=False)).capacity == (2.0, 1.0)


@pytest.mark.parametrize(
    ("row", "peak"),
    [
        ("0F0 0F1 0B0 0B1", 200.0),
        ("0F0 0I0 0F1 0I1 0W0 0W1", 130.0),
        ("0F0 0F1 0R0 0B0 0R1 0B1", 102.0),
        ("", 0.0),
    ],
)
def test_the_peak_of_what_a_row_saves(row: str, peak: float) -> None:
    actions: list[Action | None] = [*Schedule.from_rows([row.split()]).rows[0]] if row else []
    assert evaluator(in_bytes(1e9, 1e9)).peak_saved([*actions, None]) == peak
    assert evaluator(None).peak_saved(actions) == 0.0


def test_in_flight_a_stage_counts_its_share_of_the_device() -> None:
    limit = MemoryLimit((2.0, 2.0), in_bytes=False)
    judged = Evaluator(vee(2), chain(4), make_costs(4, 2, chain(4)), limit)
    assert judged.stage_share == (0.5,) * 4
    work = judged.workload([True, False, False, False])
    assert work.saved == (0.0, 0.5, 0.5, 0.5)
    assert work.weight_saved == work.recipe == (0.5,) * 4


def test_launches_and_shared_streams_count() -> None:
    schedule, costs = build_schedule("1f1b", 2, 3), {"launch": 0.7, "streams": [0, 0]}
    judged = Evaluator(loop(2, 2), chain(2), make_costs(2, 2, chain(2), **costs), None)  # type: ignore[arg-type]
    assert judged.seconds(schedule) == simulate(schedule, **costs).makespan  # type: ignore[arg-type]
    assert judged.seconds(schedule) > 12.0
