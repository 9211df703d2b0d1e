from __future__ import annotations

import pytest
from schedule_times import makespan, rows

from pipecompile.ir.in_flight import in_flight
from pipecompile.schedules import build_schedule
from pipecompile.schedules.rounds import microbatch_rounds
from pipecompile.simulation.simulator import simulate


def test_rows() -> None:
    assert rows(build_schedule("llama3", 4, 5, n_devices=2)) == [
        "0F0 0F1 0F2 0F3 0F4 2F0 2F1 2F2 2B0 2F3 2B1 2F4 2B2 2B3 2B4 0B0 0B1 0B2 0B3 0B4",
        "1F0 1F1 1F2 1F3 1F4 3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 1B0 1B1 1B2 1B3 1B4",
    ]


@pytest.mark.parametrize(("p", "v", "m"), [(1, 2, 4), (2, 3, 8), (3, 2, 12), (4, 4, 16), (8, 2, 16), (4, 2, 9)])
def test_makespan_and_memory(p: int, v: int, m: int) -> None:
    schedule, times = build_schedule("llama3", p * v, m, n_devices=p), (1.5, 0.75, 0.75)
    assert makespan(schedule, times) == pytest.approx(m * 3.0 + (p - 1) * 3.0 / v)
    longest = len(microbatch_rounds(m, 2 * p)[0])
    most = min(m * v, (v - 1) * longest + 2 * p - 1)
    assert max(in_flight(schedule.rows, schedule.placement)) == pytest.approx(most / v)


def test_slow_transfers_delay_it_less_than_rounds_of_p() -> None:
    times = [
        simulate(build_schedule(name, 8, 16, n_devices=4), transfer=1.0).makespan for name in ("llama3", "interleaved")
    ]
    assert times[0] < times[1]
