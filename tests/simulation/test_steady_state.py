"""Periodic schedules take the time of their repetitions, and it is found without simulating them all."""

from __future__ import annotations

from random import Random

import pytest

from pipecompile.errors import InputError
from pipecompile.ir.periodic import PeriodicSchedule
from pipecompile.schedules.periods import build_periodic
from pipecompile.simulation.simulator import simulate
from pipecompile.simulation.steady_state import simulate_periodic


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "interleaved", "zbv", "dualpipev", "mario", "po-half"])
def test_figures_are_those_of_the_full_simulation(name: str) -> None:
    n_stages = 3 if name in ("1f1b", "zb-h2", "mario") else 6
    periodic = build_periodic(name, n_stages, 72, n_devices=3)
    for seed in range(4):
        rng = Random(seed)
        times = [[rng.choice([1.0, 1.5, 2.0, rng.random()]) for _ in range(n_stages)] for _ in range(3)]
        costs = dict(zip(("forward", "input_grad", "weight_grad"), times, strict=True))
        costs |= {
            "transfer": rng.choice([0.0, 0.25, 3.0]),
            "offload": 0.5,
            "saved_bytes": 1.0,
            "weight_saved_bytes": 0.5,
        }
        found, full = simulate_periodic(periodic, **costs), simulate(periodic.unrolled(), **costs)
        assert found.makespan == pytest.approx(full.makespan, rel=1e-12)
        assert found.bubble == pytest.approx(full.bubble)
        assert (found.peak_memory, found.peak_in_flight) == (full.peak_memory, full.peak_in_flight)


@pytest.mark.parametrize(("name", "seconds"), [("1f1b", 3 + 6 * 0.25 / 4), ("zb-h1", 3.0), ("zbv", 6.0)])
def test_few_repetitions_are_simulated(name: str, seconds: float) -> None:
    """With `1f1b`, 4 micro-batches wait for 6 transfers of a round trip."""
    periodic = build_periodic(name, 4, 100_000)
    found = simulate_periodic(periodic, transfer=0.25)
    assert found.simulated <= 12
    assert found.period == seconds
    assert found.makespan > 100_000 * found.period


def test_what_does_not_repeat_its_times_is_simulated_in_full() -> None:
    """A host that launches has times of its own, which the devices may catch up with at any time."""
    periodic = build_periodic("1f1b", 3, 40)
    found, full = simulate_periodic(periodic, launch=0.5), simulate(periodic.unrolled(), launch=0.5)
    assert (found.period, found.simulated, found.makespan) == (None, periodic.repetitions, full.makespan)


def test_only_periodic_schedules_are_simulated_so() -> None:
    with pytest.raises(InputError, match="a str is not a PeriodicSchedule"):
        simulate_periodic("1f1b")  # type: ignore[arg-type]
    short = PeriodicSchedule.from_csv("(0F0;0B0)x2+1\n")
    assert simulate_periodic(short).makespan == 6.0
