"""Times by arrays are those of the walk by rows, to the last bit."""

from __future__ import annotations

from random import Random

import pytest
from cpu_time import assert_within

from pipecompile.errors import VerifyError
from pipecompile.ir import Route, chain
from pipecompile.ir.periodic import PeriodicSchedule
from pipecompile.schedules.periods import build_periodic
from pipecompile.simulation.array_walk import ScheduleArrays
from pipecompile.simulation.costs import make_costs
from pipecompile.simulation.simulator import build_tasks, run_to_end


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "interleaved", "zbv", "dualpipev", "mario"])
def test_times_are_those_of_the_walk_by_rows(name: str) -> None:
    rng = Random(name)
    n_stages = 3 if name in ("1f1b", "zb-h2", "mario") else 6
    schedule = build_periodic(name, n_stages, 30, n_devices=3)
    routes = (*chain(n_stages), Route("skip", 0, (n_stages - 2, n_stages - 1), 3.0))
    costs = {kind: [rng.random() for _ in range(n_stages)] for kind in ("forward", "input_grad", "weight_grad")}
    links = {"transfer": rng.choice([0.0, 0.3]), "latency": 0.1, "bandwidth": 7.0}
    run = ScheduleArrays(schedule, routes, make_costs(n_stages, 3, routes, **costs, **links)).run(schedule.repetitions)
    tasks, _ = build_tasks(schedule.unrolled(), routes, **costs, **links)
    times = run_to_end(schedule.unrolled(), tasks, make_costs(n_stages, 3, routes))
    assert run.end.tolist() == times.end
    assert run.arrival[:-1].tolist() == times.message_end
    assert run.makespan == times.makespan


def test_devices_that_wait_for_one_another_are_found() -> None:
    schedule = PeriodicSchedule.from_csv("(0B0;0F0)x2+1\n(1F0;1B0)x2+1\n")
    with pytest.raises(VerifyError, match="devices wait for one another"):
        ScheduleArrays(schedule, chain(2), make_costs(2, 2, chain(2))).run(2)


def test_many_devices_take_little_longer_than_few() -> None:
    """131,072 actions: 0.1 to 0.2 seconds, 1.6 by rows."""
    schedule = build_periodic("1f1b", 64, 1024)
    arrays = ScheduleArrays(schedule, chain(64), make_costs(64, 64, chain(64), transfer=0.1))
    assert_within(0.5, lambda: arrays.run(schedule.repetitions))
