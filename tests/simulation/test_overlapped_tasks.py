"""Actions that overlap, simulated."""

from __future__ import annotations

import pytest

from pipecompile.errors import InputError
from pipecompile.ir import Schedule
from pipecompile.simulation.simulator import simulate

ALONE = Schedule.from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")
"""One stage, forwards of 1 s and backwards of 2 s."""


@pytest.mark.parametrize(
    ("costs", "seconds"),
    [
        ({}, 3.0),
        ({"overlap": 2.5}, 2.5),
        ({"overlap": {(0, 0): 1.25}}, 1.25),
        ({"forward_communication": 0.5}, 2.5),
        ({"forward_communication": 1.0}, 2.0),
        ({"forward_communication": 0.5, "backward_communication": 1.0}, 2.0),
        ({"forward_communication": 1.0, "backward_communication": 1.0, "backward": 1.5}, 2.0),
        ({"forward": 0.0, "backward": 0.0}, 0.0),
    ],
)
def test_a_pair_takes_the_time_of_its_busier_resource(costs: dict[str, object], seconds: float) -> None:
    """Compute and communication each serve one action at a time, and no pair is shorter than one of its actions."""
    timeline = simulate(ALONE, **costs)  # type: ignore[arg-type]
    forward, backward = (next(s for s in timeline.spans if s.name == name) for name in ("0F1", "0B0"))
    assert (backward.end - forward.start, forward.end) == (seconds, backward.start)
    assert timeline.busy == timeline.makespan


def test_a_pair_waits_for_both_and_both_leave_at_its_end() -> None:
    schedule = Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n")
    spans = {span.name: span for span in simulate(schedule, transfer=0.5).spans}
    assert spans["1F1"].start == spans["0F1"].end + 0.5
    assert spans["v0'1#0"].start == spans["1B0"].end == spans["1F1"].start + 3
    assert spans["1F1"].end - spans["1F1"].start == 1


def test_both_count_in_memory_during_a_pair() -> None:
    memory = simulate(ALONE, saved_bytes=1.0).memory[0]
    assert memory == ((0.0, 1.0), (1.0, 2.0), (4.0, 1.0), (6.0, 0.0))


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"overlap": {(1, 0): 1.0}}, r"overlap has an entry for \(1, 0\)"),
        ({"overlap": {}}, r"overlap has no entry for stages \(0, 0\)"),
        ({"overlap": -1.0}, "overlap"),
        ({"overlap": "short"}, "overlap"),
        ({"forward_communication": 1.5}, r"stage 0 communicates for 1.5 s within F, which takes 1 s"),
        ({"backward_communication": 1.5}, r"stage 0 communicates for 1.5 s within I, which takes 1 s"),
    ],
)
def test_costs_that_mean_nothing_are_refused(costs: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        simulate(ALONE, **costs)  # type: ignore[arg-type]
