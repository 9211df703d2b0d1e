"""The launch plan takes as long as the program that was predicted, and is the plan that runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

import pipecompile as pc
from pipecompile.errors import InputError, VerifyError
from pipecompile.ir import Kind, Route, Tie, chain
from pipecompile.passes import lower
from pipecompile.runtime.launch_timeline import simulate_launches
from pipecompile.schedules import CATALOGUE, compared_names

UNEVEN = (1.0, 0.8, 1.2, 0.9, 1.1, 0.85, 1.15, 1.0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", compared_names())
@pytest.mark.parametrize("copy", [0.05, 0.25])
def test_launches_take_as_long_as_simulated(name: str, copy: float) -> None:
    """Before, a wait of RECV held up computes that read nothing of it: up to 10 % longer than simulated."""
    chunks = CATALOGUE[name].chunks or (2 if "interleaved" in name or "looped" in name else 1)
    for devices, uneven, skips in ((2, True, False), (4, False, False), (4, True, True)):
        schedule = pc.build_schedule(name, devices * chunks, 4 * devices, n_devices=devices)
        routes = (*chain(schedule.n_stages), *([Route("skip", 0, (schedule.n_stages - 1,))] if skips else []))
        program = lower(schedule, routes, overlap=True)
        each = [UNEVEN[s % 8] if uneven else 1.0 for s in range(schedule.n_stages)]
        costs = {"forward": each, "input_grad": each, "weight_grad": each, "transfer": copy}
        simulated = pc.simulate(program, **costs).makespan
        assert simulate_launches(program, **costs).makespan == pytest.approx(simulated, rel=0.005), (devices, uneven)


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "zbv", "v-half"])
@pytest.mark.parametrize("offload", [0.3, 2.5])
def test_launches_of_an_offloading_program_take_as_long_as_simulated(name: str, offload: float) -> None:
    """Copies to the host and back run beside compute. Slower ones hold it up where their memory is needed, in both."""
    schedule = pc.insert_offload(pc.build_schedule(name, 6, 9, n_devices=6 // (CATALOGUE[name].chunks or 2)))
    program = lower(schedule, overlap=True)
    costs = {"forward": UNEVEN[:6], "transfer": 0.1, "offload": [offload * seconds for seconds in UNEVEN[:6]]}
    simulated, launched = pc.simulate(program, **costs), simulate_launches(program, **costs)
    assert launched.makespan == pytest.approx(simulated.makespan, rel=1e-9)
    copies = [{s for s in one.spans if "host" in s.track} for one in (simulated, launched)]
    assert {s[:3] for s in copies[0]} == {s[:3] for s in copies[1]}
    assert len(copies[0]) == 2 * sum(action.kind is Kind.OFFLOAD for row in schedule.rows for action in row)
    assert offload > 1 or simulated.makespan == pc.simulate(schedule, **costs).makespan


def test_spans_are_those_of_streams() -> None:
    program = lower(pc.build_schedule("gpipe", 2, 2), overlap=True)
    timeline = pc.simulate_launches(program, transfer=0.5)
    assert [span.name for span in timeline.compute(1)] == ["1F0", "1F1", "1B0", "1B1"]
    assert {span.track for span in timeline.spans} == {"compute", "to 0", "to 1"}
    assert timeline.makespan == pc.simulate(program, transfer=0.5).makespan


def test_what_one_process_does_not_launch_is_refused() -> None:
    program = lower(pc.build_schedule("gpipe", 2, 2), ties=[Tie("w", (0, 1))])
    with pytest.raises(InputError, match="ties cannot be simulated launch by launch"):
        simulate_launches(program)
    with pytest.raises(InputError, match="engines='device'"):
        simulate_launches(lower(pc.build_schedule("gpipe", 2, 2), overlap=True), engines="device")


@pytest.mark.parametrize("change", [{"n_stages": 1}, {"routes": ()}, {"rows": 1}])
def test_a_program_that_is_not_legal_is_refused(change: dict[str, object]) -> None:
    program = lower(pc.build_schedule("1f1b", 2, 2), chain(2))
    damaged = replace(program, **({"rows": program.rows[:1]} if "rows" in change else change))  # type: ignore[arg-type]
    with pytest.raises(VerifyError):
        simulate_launches(damaged)


def test_launches_of_slices_take_their_shares() -> None:
    """Before, a slice took the seconds of its whole micro-batch, and as long to send: 51 s for 12.75."""
    program = lower(pc.build_schedule("seq1f1b", 2, 4), chain(2), overlap=True)
    costs = {"transfer": 0.3, "slice_seconds": [0.1, 0.2, 0.3, 0.4], "slice_bytes": [0.4, 0.3, 0.2, 0.1]}
    assert simulate_launches(program, **costs).makespan == pytest.approx(pc.simulate(program, **costs).makespan)


def test_launches_of_devices_on_one_stream_follow_each_other() -> None:
    program = lower(pc.build_schedule("1f1b", 2, 4), overlap=True)
    assert simulate_launches(program, streams=[0, 0]).makespan == pc.simulate(program, streams=[0, 0]).makespan == 24


@pytest.mark.parametrize("cost", ["overlap", "forward_communication", "unshard", "reduce_grad"])
def test_costs_of_what_one_process_does_not_do_are_refused(cost: str) -> None:
    program = lower(pc.insert_sharding(pc.insert_overlap(pc.build_schedule("1f1b", 2, 4))), overlap=True)
    with pytest.raises(InputError, match="cannot be simulated launch by launch"):
        simulate_launches(program, **{cost: 0.5})
