from __future__ import annotations

import pytest

from pipecompile.ir import Schedule
from pipecompile.passes import lower
from pipecompile.passes.offloading import insert_offload
from pipecompile.schedules import CATALOGUE, build_schedule, compared_names
from pipecompile.simulation.simulator import simulate

SCHEDULE = Schedule.from_csv("0F0,0OFFLOAD0,0F1,0F2,0B1,0RELOAD0,0B2,0B0\n1F0,1F1,1B1,1F2,1B2,1B0\n")


def test_memory_is_free_from_the_end_of_the_copy_out_to_the_start_of_the_copy_back() -> None:
    timeline = simulate(SCHEDULE, saved_bytes=10, offload=1.5)
    copies = {span.track: span for span in timeline.spans if "host" in span.track}
    assert (copies["to host"].start, copies["to host"].end, copies["to host"].name) == (1.0, 2.5, "@0.h#0")
    back = copies["from host"]
    assert (back.name, back.end - back.start) == ("@0#0", 1.5)
    held = dict(timeline.memory[0])
    assert held[2.0] == 30.0
    assert held[2.5] == 20.0


def test_a_backward_waits_for_its_copy_back() -> None:
    short, long = (simulate(SCHEDULE, offload=seconds) for seconds in (0.0, 5.0))
    assert long.makespan > short.makespan
    assert any(span.track == "from host" for span in long.critical_path)


def test_copies_of_a_device_in_one_direction_queue() -> None:
    rows = "0F0,0OFFLOAD0,0F1,0OFFLOAD1,0F2,0RELOAD0,0B2,0B0,0RELOAD1,0B1"
    for engines in ("pair", "device"):
        spans = simulate(Schedule.from_csv(rows), offload=3.0, engines=engines).spans
        assert [(span.start, span.end) for span in spans if span.track == "to host"] == [(1.0, 4.0), (4.0, 7.0)]


@pytest.mark.parametrize("name", [*compared_names(), "forward"])
@pytest.mark.parametrize("engines", ["pair", "device"])
def test_a_program_takes_as_long_as_its_schedule(name: str, engines: str) -> None:
    chunks = CATALOGUE[name].chunks or 1
    schedule = insert_offload(build_schedule(name, 3 * chunks, 5, n_devices=3))
    costs = {"offload": 0.7, "saved_bytes": 3.0, "engines": engines}
    planned, lowered = simulate(schedule, **costs), simulate(lower(schedule), **costs)
    assert lowered.makespan == pytest.approx(planned.makespan)
    assert lowered.peak_memory == pytest.approx(planned.peak_memory)
