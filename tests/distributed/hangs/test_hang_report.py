"""Ranks of random programs stopped at random places: the report names the instruction and the rank that were stopped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecompile.distributed.hangs.flight_dump import read_flight_dumps
from pipecompile.distributed.hangs.hang_report import HangReport, hang_report
from pipecompile.errors import InputError
from pipecompile.ir import HOST, LOSS, Op, Program, Route, chain
from pipecompile.passes import lower
from pipecompile.schedules import build_schedule, compared_names
from tests.support.flight_recordings import Fault, Recording, Stop, collective, messages_of, record
from tests.support.rank_programs import drawn_program

STEPS = 3


def lowered(schedule: str = "1f1b", n_stages: int = 3, n_microbatches: int = 4) -> Program:
    routes = (
        Route("x", HOST, (0,)),
        *chain(n_stages),
        Route(LOSS, n_stages - 1, (HOST,), gradient=schedule != "forward"),
    )
    return lower(build_schedule(schedule, n_stages, n_microbatches), routes)


def reported(recording: Recording, folder: Path, **options) -> HangReport:
    paths = recording.write(folder, **options)
    return hang_report(recording.program, read_flight_dumps(paths))


def fault_of(program: Program, random: Random, stop: Stop) -> Fault:
    device = random.randrange(program.n_devices)
    row = program.rows[device]
    computes = sum(one.op is Op.COMPUTE for one in row)
    count = computes if stop is Stop.GPU else len(messages_of(program, device))
    return Fault(stop, device, random.randrange(STEPS), random.randrange(count))


def check(program: Program, fault: Fault, **options) -> HangReport:
    with TemporaryDirectory() as folder:
        recording = record(program, STEPS, fault)
        report = reported(recording, Path(folder), **options)
    assert not report.unplaced
    place = next(place for place in report.places if place.device == fault.device)
    if fault.stop is Stop.HOST:
        message = messages_of(program, fault.device)[fault.index]
        assert (place.message.pair, place.message.place) == (message.pair, message.place)
        assert message.name in place.message.text
        assert place.step in (fault.step + 1, None)
        assert place.state == "not launched"
        assert [*report.causes] == [place.rank], str(report)
    elif fault.stop is Stop.MESSAGE:
        message = messages_of(program, fault.device)[fault.index]
        assert (place.message.pair, place.message.place) == (message.pair, message.place)
        assert place.step in (fault.step + 1, None)
        assert place.rank in report.causes
        assert len(report.causes) == 2
    elif any(place.call is not None for place in report.places):
        first = recording.first_not_over(fault.device)
        if first is not None:
            assert (place.message.pair, place.message.place) == (first[0].pair, first[0].place)
        assert place.rank in report.causes, f"{report}\n{fault}"
        assert len(report.causes) == 1 or not options.get("has_timing", True)
    return report


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", [*compared_names(), "forward"])
@pytest.mark.parametrize("stop", Stop)
def test_the_instruction_that_was_stopped_is_named_under_every_schedule(schedule: str, stop: Stop) -> None:
    for seed in range(2):
        program = drawn_program(seed, schedule).program
        check(program, fault_of(program, Random(seed), stop))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000), stop=st.sampled_from(Stop), has_timing=st.booleans(), ring=st.sampled_from([20000, 200]),
    as_json=st.booleans(),
)  # fmt: skip
def test_the_instruction_that_was_stopped_is_named(
    seed: int, stop: Stop, has_timing: bool, ring: int, as_json: bool
) -> None:
    program = drawn_program(seed).program
    check(program, fault_of(program, Random(seed), stop), has_timing=has_timing, ring=ring, as_json=as_json)


STOPPED = Fault(Stop.HOST, 1, 1, 3)
"""Rank 1 stops in step 2 before it sends the result of 1F1."""


def test_the_report_says_where_each_rank_is(tmp_path: Path) -> None:
    report = reported(record(lowered(), STEPS, STOPPED), tmp_path)
    assert str(report).splitlines() == [
        "rank 0 is at SEND v0#2[0] to 1 (result of 0F2) of step 2: begun on the GPU, 4,096 bytes",
        "rank 1 is at SEND v1#1[0] to 2 (result of 1F1) of step 2: not launched; its last message is RECV v0#1[0] from 0 (input of 1F1)",
        "rank 2 is at RECV v1#1[0] from 1 (input of 2F1) of step 2: begun on the GPU, 4,096 bytes",
        "cause: rank 1: it has not launched SEND v1#1[0] to 2 (result of 1F1), and waits for no message: it has not come past 1F1",
    ]  # fmt: skip
    page = Path(__file__).parents[3] / "docs" / "launching.md"
    assert str(report) in page.read_text(encoding="utf-8")
    data = report.to_dict()
    assert [place["step"] for place in data["places"]] == [2, 2, 2]
    assert [cause["rank"] for cause in data["causes"]] == [1]


def test_a_message_that_has_begun_on_both_ranks_is_a_matter_of_the_network(tmp_path: Path) -> None:
    report = reported(record(lowered(), STEPS, Fault(Stop.MESSAGE, 1, 1, 4)), tmp_path)
    assert all("which has begun on both" in what for what in report.causes.values())
    report = reported(record(lowered(), STEPS, Fault(Stop.MESSAGE, 1, 1, 4)), tmp_path, has_timing=False)
    assert all("TORCH_NCCL_ENABLE_TIMING=1" in what for what in report.causes.values())


def test_a_gpu_that_does_not_end_an_action_is_the_cause(tmp_path: Path) -> None:
    report = reported(record(lowered(), STEPS, Fault(Stop.GPU, 1, 1, 1)), tmp_path)
    assert report.causes == {
        1: "its GPU has not come to SEND v1#1[0] to 2 (result of 1F1), and waits for no message: it has not ended 1F1"
    }


def test_a_rank_without_a_dump_is_the_cause(tmp_path: Path) -> None:
    recording = record(lowered(), STEPS, STOPPED)
    paths = [path for path in recording.write(tmp_path) if path.name != "nccl_trace_rank_1"]
    report = hang_report(recording.program, read_flight_dumps(paths))
    assert report.causes == {1: "it has left no dump: it has ended, or its dump was not passed"}


@pytest.mark.parametrize("before", [1, 3, 5])
def test_messages_of_an_evaluation_do_not_shift_the_instructions(tmp_path: Path, before: int) -> None:
    report = reported(record(lowered(), STEPS, STOPPED), tmp_path, before=before)
    assert [place.message.text.split()[1] for place in report.places] == ["v0#2[0]", "v1#1[0]", "v1#1[0]"]
    assert {place.step for place in report.places} == {None}
    assert [*report.causes] == [1]
    assert "steps are not numbered" in str(report)


def test_a_ring_that_is_too_small_gives_what_is_certain_alone(tmp_path: Path) -> None:
    report = reported(record(lowered(), STEPS, STOPPED), tmp_path, ring=6)
    assert not report.places
    assert not report.causes
    assert "rank 0 is at message 6 of the link from rank 1 to rank 0, 4,096 bytes, direct_links.py:51" in str(report)
    assert "TORCH_FR_BUFFER_SIZE=20000" in str(report)


def test_an_order_that_fits_several_places_gives_what_is_certain_alone(tmp_path: Path) -> None:
    """A forward has two links in one order for ever: after another number of messages, any place fits."""
    program = lowered("forward", 2)
    report = reported(record(program, STEPS, Fault(Stop.HOST, 0, 2, 1)), tmp_path, before=2, ring=3)
    assert not report.places
    assert "fits several places" in str(report) or "too small" in str(report)


def copies(folder: Path, entries: dict[int, Sequence[dict]], faults: tuple[Fault | None, Fault | None]) -> HangReport:
    """Return the report on two copies of a pipeline: ranks 0, 1, 2 and 3, 4, 5."""
    paths = []
    for first, fault in zip((0, 3), faults, strict=True):
        recording = record(lowered(), STEPS, fault)
        paths += recording.write(folder, ranks=range(first, first + 3), extra=entries)
    return hang_report(lowered(), read_flight_dumps(paths))


def test_copies_have_places_of_their_own(tmp_path: Path) -> None:
    report = copies(tmp_path, {}, (None, STOPPED))
    assert report.causes[4].endswith("it has not come past 1F1")
    assert "rank 3 is at SEND v0#2[0] to 1" in str(report)


def test_a_rank_that_is_not_in_the_reduction_of_the_gradients_is_the_cause(tmp_path: Path) -> None:
    entries = {1: [collective(7, (1, 4), "scheduled")], 4: [collective(6, (1, 4), "completed")]}
    report = copies(tmp_path, entries, (None, None))
    assert "ranks 1 have launched nccl:all_reduce number 7 of group dp" in str(report)
    assert report.causes[4] == "it has not launched nccl:all_reduce number 7 of group dp"
    assert 1 not in report.causes


def test_a_reduction_that_is_launched_beside_the_row_does_not_hide_a_cause(tmp_path: Path) -> None:
    """Rank 1 stops in its row, after the launch of a reduction that rank 4, which waits for a message, has not come to."""
    recording, other = record(lowered(), STEPS, STOPPED), record(lowered(), STEPS, Fault(Stop.HOST, 0, 1, 1))
    paths = recording.write(tmp_path, extra={1: [collective(7, (1, 4), "scheduled")]}, is_extra_first=True)
    paths += other.write(tmp_path, ranks=(3, 4, 5))
    report = hang_report(lowered(), read_flight_dumps(paths))
    assert [*report.causes] == [1, 3]


def test_a_reduction_that_waits_for_a_rank_in_its_row_has_the_cause_in_the_row(tmp_path: Path) -> None:
    entries = {rank: [collective(7, (rank, rank + 3), "started")] for rank in range(3)}
    entries |= {rank: [collective(6, (rank - 3, rank), "completed")] for rank in range(3, 6)}
    report = copies(tmp_path, entries, (None, STOPPED))
    assert [*report.causes] == [4]


def test_ranks_can_be_given(tmp_path: Path) -> None:
    recording = record(lowered(), STEPS, STOPPED)
    dumps = read_flight_dumps(recording.write(tmp_path, ranks=(5, 3, 4)))
    report = hang_report(recording.program, dumps, (5, 3, 4))
    assert [*report.causes] == [3]
    with pytest.raises(InputError, match="not the 3 ranks"):
        hang_report(recording.program, dumps, (5, 3))


def test_dumps_without_links_are_refused(tmp_path: Path) -> None:
    dumps = read_flight_dumps(record(lowered(), STEPS).write(tmp_path))
    with pytest.raises(InputError, match=r"(?s)no links between 4 ranks.*TORCH_FR_BUFFER_SIZE"):
        hang_report(lowered(n_stages=4), dumps)
