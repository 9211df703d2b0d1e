from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from golden import CheckGolden
from hypothesis import HealthCheck, given, settings
from program_strategies import programs

from pipecompile.errors import VerifyError
from pipecompile.ir import HOST, Kind, Op, Operand, Program, Route, Schedule, Value, chain, keys_values
from pipecompile.ir.program_text import parse_program, parse_route
from pipecompile.passes import lower
from pipecompile.passes.offloading import insert_offload
from pipecompile.schedules import CATALOGUE, build_schedule
from pipecompile.simulation.simulator import simulate
from pipecompile.verifiers import verify

GOLDEN = Path(__file__).parent / "golden" / "lower.txt"


def test_the_whole_way_down(check_golden: CheckGolden) -> None:
    def run(text: str) -> str:
        lines = text.splitlines(keepends=True)
        routes = [parse_route(line.strip()) for line in lines if line.startswith("route ")]
        return str(lower(Schedule.from_csv("".join(line for line in lines if not line.startswith("route "))), routes))

    check_golden(GOLDEN, run)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CATALOGUE)
def test_every_schedule_of_every_size_is_legal_at_both_levels(name: str) -> None:
    chunks = CATALOGUE[name].chunks
    for n_devices in range(1, 5):
        for n_microbatches in (1, 2, 3, 6):
            for per_device in (chunks,) if chunks else (1, 2, 3):
                schedule = build_schedule(name, n_devices * per_device, n_microbatches, n_devices=n_devices)
                verify(schedule)
                verify(lower(schedule))


SLICED = build_schedule("seq1f1b", 2, 2, n_slices=3)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_slices_are_numbered_over_all_micro_batches(checkpoint: str) -> None:
    program = lower(SLICED, checkpoint=checkpoint)  # type: ignore[arg-type]
    assert parse_program(str(program)) == program
    assert str(program).startswith("program: 2 stages on devices 0 1, 6 slices, 3 per micro-batch\n")
    lines = [str(one) for one in program.rows[0] if one.action]
    kept = "@0#4[2]" if checkpoint == "never" else "@0.r#4[2]"
    assert f"0F4 @0.k#3[3] -> v0#4[0] {kept} @0.k#4[2]" in lines
    simulated = [simulate(one, saved_bytes=6.0, transfer=0.1) for one in (program, SLICED)]
    if checkpoint == "never":
        assert simulated[0].makespan == pytest.approx(simulated[1].makespan)
        assert simulated[0].peak_memory == pytest.approx(simulated[1].peak_memory)
        assert {span.name for span in simulated[0].spans} == {span.name for span in simulated[1].spans}


def test_slices_in_another_order_are_illegal() -> None:
    program = lower(SLICED)
    backwards = [i for i, one in enumerate(program.rows[1]) if one.action and one.action.kind is Kind.BACKWARD]
    for index in backwards:
        one = program.rows[1][index]
        for damaged in (
            replace(one, reads=one.reads[:-1]),
            replace(one, reads=(*one.reads, Operand(keys_values(1, 5)))),
        ):
            row = (*program.rows[1][:index], damaged, *program.rows[1][index + 1 :])
            if damaged.reads != one.reads and len({o.value for o in damaged.reads}) != len(
                {o.value for o in one.reads}
            ):
                with pytest.raises(VerifyError, match=r"must (not )?read @1\.k#"):
                    verify(replace(program, rows=(program.rows[0], row)))
    with pytest.raises(VerifyError, match="6 slices are not whole micro-batches of 4 slices"):
        verify(replace(program, n_slices=4))
    with pytest.raises(VerifyError):
        verify(replace(program, n_slices=1))


def test_no_routes_means_a_chain() -> None:
    schedule = build_schedule("1f1b", 3, 4)
    assert lower(schedule) == lower(schedule, chain(3))


def test_an_illegal_schedule_is_refused_under_its_own_name() -> None:
    with pytest.raises(VerifyError, match="schedule 'mine' is not legal"):
        lower(Schedule.from_csv("0F0,0B0\n1F0\n", name="mine"))


def test_illegal_routes_are_refused() -> None:
    with pytest.raises(VerifyError, match="route a: 1 -> 0, 0 bytes, gradient: the route goes back"):
        lower(build_schedule("gpipe", 2, 1), [Route("a", 1, (0,))])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs())
def test_a_value_crosses_once_per_consumer_device_and_slots_are_the_fewest(program: Program) -> None:
    device = {HOST: HOST, **dict(enumerate(program.placement))}
    sends = Counter((i.reads[0].value, i.peer) for row in program.rows for i in row if i.op is Op.SEND)
    forwards = {key: count for key, count in sends.items() if key[0].consumer is None}
    assert forwards == {
        (value, peer): 1
        for route in program.routes
        if route.source != HOST
        for value, peer in _crossings(program, route, device)
    }
    for row in program.rows:
        live, most, used = Counter[object](), Counter[object](), dict[object, set[int | None]]()
        for instruction in row:
            for operand in instruction.writes:
                buffer = operand.value.name, operand.value.consumer
                live[buffer] += 1
                most[buffer] = max(most[buffer], live[buffer])
                used.setdefault(buffer, set()).add(operand.slot)
            if instruction.op is Op.FREE:
                live[instruction.reads[0].value.name, instruction.reads[0].value.consumer] -= 1
        assert {buffer: set(range(count)) for buffer, count in most.items()} == used


def _crossings(program: Program, route: Route, device: dict[int, int]) -> set[tuple[object, int]]:
    peers = {device[consumer] for consumer in route.consumers} - {device[route.source]}
    return {(Value(route.value, m), peer) for m in range(program.n_microbatches) for peer in peers}


def test_what_is_offloaded_is_freed_after_the_next_copy_where_copies_run_beside_compute() -> None:
    """Before, such schedules were refused; a FREE at once would let compute wait for each copy."""
    schedule = insert_offload(build_schedule("gpipe", 2, 4))
    at_once, later = (
        [str(one).split("[")[0] for one in lower(schedule, overlap=overlap).rows[0] if "@0.o" in str(one)]
        for overlap in (False, True)
    )
    assert at_once[2] == "FREE @0.o#0"
    assert later[:5] == ["0F0 -> v0#0", "0OFFLOAD0 @0.o#0", "0F1 -> v0#1", "0OFFLOAD1 @0.o#1", "FREE @0.o#0"]
    row = [str(one).split(" ")[0] for one in lower(schedule, overlap=True).rows[0]]
    assert len([one for one in row if one == "FREE"]) == len(
        [one for one in lower(schedule).rows[0] if one.op is Op.FREE]
    )
