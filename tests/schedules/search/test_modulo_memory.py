from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from pipecompile.ir import Kind
from pipecompile.schedules.building_blocks import loop, vee
from pipecompile.schedules.search.modulo_memory import memory_excess
from pipecompile.schedules.search.modulo_schedule import ModuloPlacer, ModuloSchedule
from pipecompile.schedules.search.workload import Workload, unit_workload


def most_held(placed: ModuloSchedule, work: Workload, device: int) -> float:
    """What many micro-batches hold on a device at the most, event by event."""
    events = []
    ends = {(kind, s): end for kind, s, _, end in placed.actions}
    for kind, s, start, _ in placed.actions:
        if kind is Kind.FORWARD and work.placement[s] == device:
            until, last = ends[Kind.INPUT_GRAD, s], ends[Kind.WEIGHT_GRAD, s]
            for m in range(60):
                shift = m * placed.period
                events += [(start + shift, work.saved[s]), (until + shift, work.weight_saved[s] - work.saved[s])]
                events.append((last + shift, -work.weight_saved[s]))
    held = most = 0.0
    for _, size in sorted((round(time, 9), size) for time, size in events):
        held += size
        most = max(most, held)
    return most


@pytest.mark.parametrize("seed", range(12))
def test_the_steady_state_holds_what_many_micro_batches_hold(seed: int) -> None:
    rng = Random(seed)
    place = rng.choice([loop(3, 3), vee(2), loop(6, 3)])
    stages = range(len(place))
    work = replace(
        unit_workload(place),
        forward=tuple(rng.uniform(0.5, 2) for _ in stages),
        saved=tuple(float(rng.randint(2, 9)) for _ in stages),
        weight_saved=tuple(float(rng.randint(0, 2)) for _ in stages),
    )
    placer = ModuloPlacer(work)
    placed = placer.place(rng.uniform(9, 12), [rng.choice([0.0, rng.uniform(0, 3)]) for _ in range(placer.n_delays)])
    assert placed is not None
    peaks = [most_held(placed, work, device) for device in range(work.n_devices)]
    assert memory_excess(placed, work, peaks) == 0
    assert memory_excess(placed, work, [peak / 2 for peak in peaks]) == pytest.approx(work.n_devices)


def test_a_recomputed_stage_holds_its_recipe_until_r() -> None:
    work = replace(unit_workload(loop(2, 2)), is_recomputed=(True, False), recipe=(0.25, 0.0), split=False)
    placed = ModuloPlacer(work).place(50.0, [0.0] * 4)
    assert placed is not None
    assert memory_excess(placed, work, (1.25, 1.0)) == 0
    assert memory_excess(placed, work, (0.625, 1.0)) == pytest.approx(1.0)
