from __future__ import annotations

from pipecompile.ir import Kind, Schedule
from pipecompile.ir.in_flight import in_flight


def counts(csv: str, until: Kind = Kind.WEIGHT_GRAD) -> tuple[float, ...]:
    schedule = Schedule.from_csv(csv)
    return in_flight(schedule.rows, schedule.placement, until=until)


def test_a_micro_batch_is_in_flight_until_its_b_or_its_w() -> None:
    assert counts("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n") == (2.0, 1.0)
    assert counts("0F0,0I0,0F1,0I1,0W0,0W1\n") == (2.0,)
    assert counts("0F0,0I0,0F1,0I1,0W0,0W1\n", until=Kind.INPUT_GRAD) == (1.0,)
    assert counts("0F0,0R0,0B0\n", until=Kind.INPUT_GRAD) == (1.0,)


def test_a_stage_counts_as_its_share_of_the_device() -> None:
    assert counts("0F0,1F0,1B0,0B0\n") == (1.0,)
    assert counts("0F0,0F1,1F0,1B0,0B0,1F1,1B1,0B1\n") == (1.5,)


def test_without_a_backward_nothing_is_in_flight() -> None:
    assert counts("0F0,0F1\n") == (0.0,)
