"""A whole training step: reductions and optimizer steps at computed times, jitter that only lengthens, rendezvous that only waits."""

from __future__ import annotations

import pytest

from pipecompile.errors import InputError
from pipecompile.ir import Route, Schedule, Tie
from pipecompile.ir.timeline import COMPUTE
from pipecompile.passes import lower
from pipecompile.passes.sharding import insert_sharding
from pipecompile.schedules import build_schedule
from pipecompile.simulation.forecast import REDUCE, forecast
from pipecompile.simulation.simulator import simulate


def test_without_more_it_is_the_simulation() -> None:
    schedule = build_schedule("1f1b", 3, 6)
    found = forecast(schedule, transfer=0.5)
    assert found.timeline == simulate(schedule, transfer=0.5)
    assert (found.seconds, found.mean, found.worst, found.draws) == (found.timeline.makespan,) * 3 + ((),)


def test_reductions_run_beside_backwards_and_the_optimizer_after_them() -> None:
    """Stage 2 of device 0 is complete at 8 s, and stage 0, the last of the device, at 15."""
    schedule = Schedule.from_csv("0F0,2F0,2B0,0B0\n1F0,1B0\n")
    found = forecast(schedule, backward=[4, 3, 2], forward=2, reduction=[1, 9, 6], optimizer=[0.5, 0.25, 1])
    spans = {(s.track, s.name): (s.device, s.start, s.end) for s in found.timeline.spans if " " in s.name}
    assert spans == {
        (REDUCE, "gradients 2"): (0, 8.0, 14.0),
        (REDUCE, "gradients 0"): (0, 15.0, 16.0),
        (REDUCE, "gradients 1"): (1, 11.0, 20.0),
        (COMPUTE, "optimizer 2"): (0, 15.0, 16.0),
        (COMPUTE, "optimizer 0"): (0, 16.0, 16.5),
        (COMPUTE, "optimizer 1"): (1, 20.0, 20.25),
    }
    assert found.seconds == 20.25


def test_all_copies_of_a_stage_reduce_together_and_have_an_optimizer_step() -> None:
    """The first copy of each stage had them alone. Stage 1 is complete at 4 s, and stage 0 at 6, the end of both rows."""
    schedule = Schedule.from_csv("0F0,1F1,1B1,0B0\n0F1,1F0,1B0,0B1\n")
    for subject in (schedule, lower(schedule)):
        found = forecast(subject, reduction=[1, 3], optimizer=[0.5, 0.25])
        spans = sorted((s.track, s.name, s.device, s.start, s.end) for s in found.timeline.spans if " " in s.name)
        assert spans == [
            *((COMPUTE, "optimizer 0", device, 8.0, 8.5) for device in (0, 1)),
            *((COMPUTE, "optimizer 1", device, 7.0, 7.25) for device in (0, 1)),
            *((REDUCE, "gradients 0", device, 7.0, 8.0) for device in (0, 1)),
            *((REDUCE, "gradients 1", device, 4.0, 7.0) for device in (0, 1)),
        ]


def test_the_optimizer_waits_for_collectives_and_for_ties() -> None:
    """Before, it stepped as soon as the last action was over: 2 s before the gradients were there."""
    sharded = insert_sharding(build_schedule("gpipe", 2, 2))
    assert simulate(sharded, reduce_grad=5.0).makespan == 9.0 + 5.0
    assert forecast(sharded, reduce_grad=5.0, optimizer=1.0).seconds == 9.0 + 5.0 + 1.0
    assert forecast(sharded, reduce_grad=5.0, reduction=2.0, optimizer=1.0).seconds == 9.0 + 5.0 + 2.0 + 1.0
    tied = lower(build_schedule("gpipe", 2, 2), ties=[Tie("w", (0, 1))])
    costs = {"v0": 0.0, "w": 5.0}
    assert simulate(tied, transfer=costs).makespan == 16.0
    assert forecast(tied, transfer=costs, optimizer=1.0).seconds == 16.0 + 1.0


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_jitter_lengthens_the_mean_and_the_seed_repeats_it(name: str) -> None:
    schedule = build_schedule(name, 4, 8)
    calm, some, much = (forecast(schedule, jitter=j, draws=60, transfer=0.1) for j in (0.0, 0.1, 0.4))
    assert calm.draws == ()
    assert calm.seconds == some.seconds < some.mean < some.worst
    assert some.mean < much.mean
    assert forecast(schedule, jitter=0.1, draws=60, transfer=0.1).draws == some.draws
    assert forecast(schedule, jitter=0.1, draws=60, transfer=0.1, seed=1).draws != some.draws


def test_one_action_varies_as_much_as_asked_for() -> None:
    found = forecast(Schedule.from_csv("0F0\n"), jitter=0.2, draws=4000)
    assert found.mean == pytest.approx(1.0, abs=0.015)
    spread = (sum((each - found.mean) ** 2 for each in found.draws) / len(found.draws)) ** 0.5
    assert spread == pytest.approx(0.2, abs=0.015)


def test_with_rendezvous_both_ends_wait_for_the_transfer() -> None:
    """0F0 0..1, transfer 1..4, 1F0 4..5; the second send begins when device 1 is ready again, at 5."""
    program = lower(Schedule.from_csv("0F0,0F1\n1F0,1F1\n"))
    spans = {s.name: (s.start, s.end) for s in forecast(program, rendezvous=True, transfer=3.0).timeline.spans}
    assert spans == {"0F0": (0, 1), "v0#0": (1, 4), "1F0": (4, 5), "0F1": (4, 5), "v0#1": (5, 8), "1F1": (8, 9)}
    buffered = {s.name: (s.start, s.end) for s in forecast(program, transfer=3.0).timeline.spans}
    assert buffered == {"0F0": (0, 1), "v0#0": (1, 4), "1F0": (4, 5), "0F1": (1, 2), "v0#1": (4, 7), "1F1": (7, 8)}


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbv"])
def test_rendezvous_is_never_faster_and_ends(name: str) -> None:
    program = lower(build_schedule(name, 3 if name == "1f1b" else 6, 6, n_devices=3))
    waits = forecast(program, rendezvous=True, transfer=0.5).timeline
    assert waits.makespan > simulate(program, transfer=0.5).makespan
    assert forecast(program, rendezvous=True).seconds >= simulate(program).makespan


def test_devices_of_one_card_send_one_after_the_other() -> None:
    """Devices 0 and 1 send to 2 and 3 at the same time, over one card; with cards of their own they do not wait."""
    routes = (Route("a", 0, (2,)), Route("b", 1, (3,)))
    schedule = Schedule.from_csv("0F0\n1F0\n2F0\n3F0\n")
    one, own = (forecast(schedule, routes=routes, transfer=3.0, nics=nics) for nics in ([0, 0, 1, 2], [0, 1, 2, 3]))
    assert own.timeline == simulate(schedule, routes=routes, transfer=3.0)
    assert (own.seconds, one.seconds) == (5.0, 8.0)
    into_one = forecast(schedule, routes=routes, transfer=3.0, nics=[0, 1, 2, 2])
    assert into_one.seconds == 8.0
    inside = forecast(schedule, routes=routes, transfer=3.0, nics=[0, 0, 0, 0])
    assert inside.seconds == 5.0


def test_what_makes_no_sense_is_refused() -> None:
    schedule = build_schedule("1f1b", 2, 4)
    with pytest.raises(InputError, match="rendezvous needs a program"):
        forecast(schedule, rendezvous=True)
    with pytest.raises(InputError, match="reduction has 1 number for 2 stages"):
        forecast(schedule, reduction=[1.0])
    with pytest.raises(InputError, match="nics has 1 number for 2 devices"):
        forecast(schedule, nics=[0])
    with pytest.raises(InputError, match="jitter"):
        forecast(schedule, jitter=-0.1)
    with pytest.raises(InputError, match="draws"):
        forecast(schedule, jitter=0.1, draws=-1)
