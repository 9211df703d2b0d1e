"""Compute beside copies takes longer, by as much as it is beside them; without contention the times are those of the event walk."""

from __future__ import annotations

from random import Random

import pytest

from pipecompile.errors import InputError
from pipecompile.ir import Schedule
from pipecompile.passes import lower
from pipecompile.schedules import build_schedule
from pipecompile.simulation.contention_walk import walk_contended
from pipecompile.simulation.event_walk import walk_events
from pipecompile.simulation.forecast import forecast
from pipecompile.simulation.simulator import build_tasks, simulate


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "interleaved", "zbv"])
def test_without_contention_times_are_those_of_the_event_walk(name: str) -> None:
    rng, n_stages = Random(name), 3 if name in ("1f1b", "zb-h2") else 6
    costs = {kind: [rng.random() for _ in range(n_stages)] for kind in ("forward", "input_grad", "weight_grad")}
    schedule = build_schedule(name, n_stages, 6, n_devices=3)
    for subject in (schedule, lower(schedule)):
        tasks, _ = build_tasks(subject, transfer=0.3, **costs)
        events, contended = walk_events(tasks), walk_contended(tasks, 0.0)
        assert contended.is_complete
        assert contended.end == pytest.approx(events.end)
        assert contended.message_start == pytest.approx(events.message_start)
        assert contended.message_end == pytest.approx(events.message_end)


def test_what_runs_beside_a_copy_takes_longer_by_its_share() -> None:
    """v0#0 1..3 is beside F1, which takes 1..3 at half speed. v0#1 3..5 is beside F2, which has 1 of 2 seconds done at 5 s."""
    schedule = Schedule.from_csv("0F0,0F1,0F2\n1F0,1F1,1F2\n")
    spans = forecast(schedule, forward=[1.0, 0.5], transfer=2.0, contention=1.0).timeline.spans
    times = {span.name: (span.start, span.end) for span in spans}
    assert times == {
        "0F0": (0, 1), "v0#0": (1, 3), "0F1": (1, 3), "v0#1": (3, 5), "0F2": (3, 5), "v0#2": (5, 7),
        "1F0": (3, 4), "1F1": (5, 6), "1F2": (7, 7.5),
    }  # fmt: skip


def test_a_step_with_contention_is_longer() -> None:
    program = lower(build_schedule("1f1b", 4, 8))
    calm = simulate(program, transfer=0.5)
    spans = [
        forecast(program, transfer=0.5, contention=c, rendezvous=r).seconds for c in (0.2, 1.0) for r in (False, True)
    ]
    assert calm.makespan < spans[0] < spans[2]
    waits = forecast(program, transfer=0.5, rendezvous=True).seconds
    assert spans[1] == spans[3] == pytest.approx(waits), "with rendezvous no device computes beside its copies"
    with pytest.raises(InputError, match="contention goes together with links and nics only"):
        forecast(program, contention=0.1, engines="device")
    with pytest.raises(InputError, match="contention"):
        forecast(program, contention=-1)
