from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from pipecompile.ir import Kind
from pipecompile.schedules.building_blocks import loop, vee
from pipecompile.schedules.search.modulo_memory import memory_excess
from pipecompile.schedules.search.modulo_schedule import ModuloPlacer, ModuloSchedule
from pipecompile.schedules.search.workload import Transfer, Workload, unit_workload


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


def test_values_are_held_at_both_ends_of_a_transfer() -> None:
    """Two stages, transfers of 2 seconds: F0 0 to 1, F1 3 to 4, I1 4 to 5, I0 7 to 8. Device 0 holds the value until 3, its gradient from 5."""
    work = unit_workload((0, 1))
    sent = Transfer(1, 2.0, (1,), "v0", 8.0), Transfer(0, 2.0, (0,), "v0", 4.0)
    work = replace(work, forward_transfers=((sent[0],), ()), gradient_transfers=((), (sent[1],)), split=False)
    work = replace(work, backward=(1.0, 1.0), saved=(1.0, 1.0))
    placed = ModuloPlacer(work).place(50.0, [0.0] * 4)
    assert placed is not None
    assert memory_excess(placed, work, (9.0, 9.0)) == 0
    assert memory_excess(placed, work, (4.5, 9.0)) == pytest.approx(1.0)
    assert memory_excess(placed, work, (9.0, 4.5)) == pytest.approx(1.0)
    without = replace(work, forward_transfers=((replace(sent[0], nbytes=0.0),), ()))
    assert memory_excess(placed, without, (5.0, 5.0)) == 0


def test_recomputation_reads_the_received_value_again() -> None:
    work = unit_workload((0, 1))
    sent = ((Transfer(1, 0.0, (1,), "v0", 8.0),), ())
    work = replace(work, forward_transfers=sent, is_recomputed=(False, True), recipe=(0.0, 0.5), split=False)
    placed = ModuloPlacer(work).place(50.0, [0.0, 0.0, 0.0, 3.0])
    assert placed is not None
    assert memory_excess(placed, work, (9.0, 9.5)) == 0, "R holds the recipe, what it saves, and the value"
    assert memory_excess(placed, work, (9.0, 9.4)) == pytest.approx(0.1 / 9.4)
