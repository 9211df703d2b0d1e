from __future__ import annotations

import pytest
from torch_generators import multi_order, written

from pipecompile.ir import Schedule
from pipecompile.schedules import build_schedule
from pipecompile.simulation.simulator import simulate


@pytest.mark.parametrize("p", range(1, 6))
@pytest.mark.parametrize("more", [0, 1, 5])
def test_rows_pairs_and_makespan(p: int, more: int) -> None:
    m = 2 * p + more
    schedule = build_schedule("dualpipev-overlap", 2 * p, m)
    assert (
        schedule
        == Schedule.from_csv(written(multi_order("ScheduleDualPipeV", p, 2, m)))
        == Schedule.from_csv(str(schedule))
    )
    timeline = simulate(schedule, forward=0.5, input_grad=0.5, weight_grad=0.5)
    assert timeline.makespan == 3 * m + (p - 1)
    assert max(timeline.peak_in_flight) <= p + 0.5


def test_communication_within_stages_is_hidden() -> None:
    """Two devices, 8 micro-batches: of 24, the pairs hide what is communication on the device with most of them."""
    costs = {"forward_communication": 0.5, "backward_communication": 1.0}
    plain, pairs = (simulate(build_schedule(name, 4, 8), **costs) for name in ("dualpipev", "dualpipev-overlap"))
    assert pairs.makespan < 0.8 * plain.makespan


def test_few_micro_batches_do_not_overlap() -> None:
    assert not build_schedule("dualpipev-overlap", 8, 7).overlaps
