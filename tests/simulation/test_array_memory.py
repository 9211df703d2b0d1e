from __future__ import annotations

import pytest

from pipecompile.ir import chain
from pipecompile.schedules.periods import build_periodic
from pipecompile.simulation.array_memory import peak_bytes
from pipecompile.simulation.array_walk import ScheduleArrays
from pipecompile.simulation.costs import make_costs
from pipecompile.simulation.simulator import simulate


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zbv", "mario", "po-half"])
@pytest.mark.parametrize("forward", [1.0, 0.0])
def test_peaks_are_those_of_the_memory_curves(name: str, forward: float) -> None:
    """Also where actions take no time, so that several changes are at one moment."""
    n_stages = 6 if name in ("zbv", "po-half") else 3
    schedule = build_periodic(name, n_stages, 24, n_devices=3)
    costs = {"saved_bytes": [3.0 + s for s in range(n_stages)], "weight_saved_bytes": 2.0, "recipe_bytes": 0.5}
    costs |= {
        "parameter_bytes": 7.0,
        "gradient_bytes": [5.0 + s for s in range(n_stages)],
        "forward": forward,
        "transfer": 0.25,
    }
    checked = make_costs(n_stages, 3, chain(n_stages), **costs)
    run = ScheduleArrays(schedule, chain(n_stages), checked).run(schedule.repetitions)
    assert peak_bytes(run, schedule.placement, checked) == simulate(schedule.unrolled(), **costs).peak_memory


def test_without_sizes_a_device_holds_its_parameters() -> None:
    schedule = build_periodic("1f1b", 2, 12)
    costs = make_costs(2, 2, chain(2), parameter_bytes=[5.0, 0.0])
    run = ScheduleArrays(schedule, chain(2), costs).run(4)
    assert peak_bytes(run, schedule.placement, costs) == (5.0, 0.0)
