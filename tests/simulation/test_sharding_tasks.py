from __future__ import annotations

import pytest

from pipecompile.ir import Schedule
from pipecompile.passes import lower
from pipecompile.passes.sharding import insert_sharding
from pipecompile.schedules import build_schedule
from pipecompile.simulation.simulator import simulate

SCHEDULE = Schedule.from_csv(
    "0UNSHARD,1UNSHARD,0F0,0RESHARD,1F0,1B0,1RESHARD,0UNSHARD,1REDUCE_GRAD,0B0,0RESHARD,0REDUCE_GRAD\n"
)
COSTS = {"unshard": [0.5, 2.0], "reduce_grad": 3.0, "unsharded_bytes": [10.0, 20.0], "gradient_bytes": [1.0, 2.0]}


def test_collectives_queue_beside_the_device_and_actions_wait_for_theirs() -> None:
    timeline = simulate(SCHEDULE, **COSTS)
    collectives = [(s.name, s.start, s.end) for s in timeline.spans if s.track == "collectives"]
    assert collectives == [
        ("0UNSHARD", 0.0, 0.5), ("1UNSHARD", 0.5, 2.5), ("0UNSHARD", 5.5, 6.0), ("1REDUCE_GRAD", 6.0, 9.0), ("0REDUCE_GRAD", 9.0, 12.0),
    ]  # fmt: skip
    starts = {span.name: span.start for span in timeline.spans if span.track == "compute"}
    assert (starts["0F0"], starts["1F0"], starts["1B0"], starts["0B0"]) == (0.5, 2.5, 3.5, 6.0)
    assert timeline.makespan == 12.0


def test_memory_has_what_is_gathered_and_gradients_until_they_are_reduced() -> None:
    timeline = simulate(SCHEDULE, **COSTS)
    assert timeline.memory == (
        ((0.0, 30.0), (1.5, 20.0), (3.5, 22.0), (5.5, 12.0), (6.0, 13.0), (8.0, 3.0), (9.0, 1.0), (12.0, 0.0)),
    )


def test_bytes_over_a_bandwidth_are_seconds() -> None:
    costs = {"unsharded_bytes": [10.0, 20.0], "gradient_bytes": [30.0, 30.0], "shard_bandwidth": 10.0}
    spans = simulate(SCHEDULE, **costs).spans
    assert [s.end - s.start for s in spans if s.track == "collectives"] == pytest.approx([1.0, 2.0, 1.0, 3.0, 3.0])


@pytest.mark.parametrize("name", ["interleaved", "zbv", "dualpipev-overlap", "forward"])
@pytest.mark.parametrize("engines", ["pair", "device"])
def test_a_program_takes_as_long_as_its_schedule(name: str, engines: str) -> None:
    schedule = insert_sharding(build_schedule(name, 6, 6, n_devices=3), ahead=0)
    costs = {"unshard": 0.7, "reduce_grad": 0.9, "saved_bytes": 3.0, "unsharded_bytes": 5.0, "gradient_bytes": 4.0}
    planned, lowered = simulate(schedule, engines=engines, **costs), simulate(lower(schedule), engines=engines, **costs)
    assert lowered.makespan == pytest.approx(planned.makespan)
    assert lowered.peak_memory == pytest.approx(planned.peak_memory)
