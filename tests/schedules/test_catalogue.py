"""Every schedule of every size is legal, as a schedule and as a program under all models of communication; both texts parse;
both simulate to the same times. A sample of the sizes; all with `--full`. Names and counts are looked up and checked.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from pipecompile.errors import ScheduleError
from pipecompile.ir import Route, Schedule, chain
from pipecompile.ir.in_flight import in_flight
from pipecompile.ir.program_text import parse_program
from pipecompile.passes import lower
from pipecompile.schedules import CATALOGUE, build_schedule, compared_names, register_schedule
from pipecompile.schedules.building_blocks import loop, vee, zigzag
from pipecompile.simulation.simulator import simulate
from pipecompile.verifiers import verify
from tests.support.towers import dag

MOST_DEVICES, MOST_MICROBATCHES, MOST_CHUNKS = 8, 16, 4


def sizes(name: str) -> Iterator[tuple[int, int, int]]:
    """Yield (stages, devices, micro-batches)."""
    chunks = CATALOGUE[name].chunks
    for n_devices in range(1, MOST_DEVICES + 1):
        for per_device in (chunks,) if chunks else range(1, MOST_CHUNKS + 1):
            for n_microbatches in range(1, MOST_MICROBATCHES + 1):
                yield n_devices * per_device, n_devices, n_microbatches


def _sample(name: str, count: int) -> list[tuple[int, int, int]]:
    """Return some of the sizes; of a schedule that searches leave out a third as many."""
    return random.Random(name).sample(list(sizes(name)), count if name in compared_names() else count // 3)


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_size_is_legal(name: str, pytestconfig: pytest.Config) -> None:
    for n_stages, n_devices, n_microbatches in sizes(name) if pytestconfig.getoption("--full") else _sample(name, 80):
        verify(build_schedule(name, n_stages, n_microbatches, n_devices=n_devices))


@pytest.mark.parametrize("name", CATALOGUE)
def test_lowered_written_and_simulated(name: str, pytestconfig: pytest.Config) -> None:
    every = list(sizes(name))
    some = every if pytestconfig.getoption("--full") else _sample(name, 8)
    for n_stages, n_devices, n_microbatches in some:
        schedule = build_schedule(name, n_stages, n_microbatches, n_devices=n_devices)
        assert Schedule.from_csv(schedule.to_csv()) == schedule
        if CATALOGUE[name].has_slices:
            continue
        program = lower(schedule)
        assert parse_program(str(program)) == program
        of_schedule, of_program = (simulate(each, transfer=0.25, saved_bytes=1.0) for each in (schedule, program))
        assert set(of_schedule.spans) == set(of_program.spans)
        assert of_schedule.memory == of_program.memory
        assert of_schedule.peak_in_flight == of_program.peak_in_flight


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_schedule_knows_its_name_and_counts(name: str) -> None:
    schedule = build_schedule(name, 4, 5)
    n_devices = 2 if CATALOGUE[name].chunks == 2 else 4
    assert (schedule.name, schedule.n_stages, schedule.n_microbatches, schedule.n_devices) == (name, 4, 5, n_devices)


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_placement_is_a_loop_or_a_v_or_to_and_fro_and_can_be_asked_for(name: str) -> None:
    chunks = CATALOGUE[name].chunks or 3
    schedule = build_schedule(name, 4 * chunks, 1, n_devices=4)
    if name == "hanayo":
        assert schedule.placement == zigzag(12, 4) == (0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 2, 3)
    else:
        assert schedule.placement == (vee(4) if chunks == 2 and name != "po-half" else loop(4 * chunks, 4))


def test_the_schedules_that_searches_compare() -> None:
    """One in as little memory and as fast as each of the others is among them."""
    assert set(CATALOGUE) - set(compared_names()) == {
        "sequential", "gpipe-remat", "ooo-backprop", "2bp", "zb-1p", "zb-2p", "checkpoint-window", "mario", "v-two-thirds", "hanayo", "chimera", "dualpipe",
        "llama3", "dualpipev-overlap", "po-half", "po-full", "seq1f1b", "seq1f1b-interleaved", "terapipe", "forward",
    }  # fmt: skip


def test_searches_compare_schedules_of_whole_micro_batches() -> None:
    for name, entry in CATALOGUE.items():
        assert entry.has_slices == (build_schedule(name, 4, 4).n_slices > 1)
        assert not (entry.has_slices and entry.compared)


def test_searches_compare_schedules_of_one_copy_of_each_stage() -> None:
    for name, entry in CATALOGUE.items():
        assert entry.has_copies == bool(build_schedule(name, 4, 4).directions)
        assert not (entry.has_copies and entry.compared)


def test_an_unknown_name_lists_those_known_and_tries_the_nearest() -> None:
    known = r"no schedule is called '1F1'\n  why    known are 'gpipe', '1f1b', .*'forward'\n  try    '1f1b'"
    with pytest.raises(ScheduleError, match=known):
        build_schedule("1F1", 2, 2)


@pytest.mark.parametrize(
    ("name", "n_stages", "n_devices", "message"),
    [
        (
            "1f1b",
            4,
            2,
            "1f1b runs 1 stage per device, not 4 stages on 2 devices\n  try    n_devices=4, or one of 'gpipe'",
        ),
        ("zb-h2", 4, 1, "zb-h2 runs 1 stage per device, not 4 stages on 1 device\n  try    n_devices=4"),
        ("zbv", 4, 4, "zbv runs 2 stages per device, not 4 stages on 4 devices\n  try    n_devices=2"),
        ("v-min", 3, 3, "v-min runs 2 stages per device, not 3 stages on 3 devices\n  try    n_stages=6"),
        ("dualpipev", 5, None, "5 stages cannot be divided among 2 devices\n"),
        ("v-half", 1, None, "v-half runs 2 stages per device, not 1 stage on 1 device\n  try    n_stages=2"),
    ],
)
def test_a_wrong_number_of_stages_per_device_is_refused_with_a_way_out(
    name: str, n_stages: int, n_devices: int | None, message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        build_schedule(name, n_stages, 4, n_devices=n_devices)


def one_by_one(n_stages: int, n_microbatches: int, n_devices: int) -> Schedule:
    """Return a schedule that runs one micro-batch after another."""
    rows: list[list[str]] = [[] for _ in range(n_devices)]
    for m in range(n_microbatches):
        for stage in range(n_stages):
            rows[stage % n_devices].append(f"{stage}F{m}")
        for stage in reversed(range(n_stages)):
            rows[stage % n_devices].append(f"{stage}B{m}")
    return Schedule.from_rows(rows, "one-by-one")


def test_a_function_is_a_schedule() -> None:
    schedule = build_schedule(one_by_one, 4, 2, n_devices=2)
    assert schedule.to_csv().splitlines() == ["0F0,2F0,2B0,0B0,0F1,2F1,2B1,0B1", "1F0,3F0,3B0,1B0,1F1,3F1,3B1,1B1"]
    with pytest.raises(ScheduleError, match="4 stages cannot be divided among 3 devices"):
        build_schedule(one_by_one, 4, 2, n_devices=3)


@pytest.fixture
def registered() -> Iterator[str]:
    register_schedule("one-by-one", one_by_one, chunks=2)
    yield "one-by-one"
    del CATALOGUE["one-by-one"]


def test_a_function_can_get_a_name(registered: str) -> None:
    assert build_schedule(registered, 4, 3).n_devices == 2
    with pytest.raises(ScheduleError, match="one-by-one runs 2 stages per device"):
        build_schedule(registered, 4, 3, n_devices=4)
    with pytest.raises(ScheduleError, match="a schedule is called 'one-by-one' already"):
        register_schedule(registered, one_by_one)
    with pytest.raises(ScheduleError, match="a schedule is called 'gpipe' already"):
        register_schedule("gpipe", one_by_one)


@pytest.mark.parametrize("name", ["", " ", "auto", "mine.csv", "mine.txt"])
def test_a_name_that_means_something_else_is_refused(name: str) -> None:
    with pytest.raises(ScheduleError, match="cannot be the name of a schedule"):
        register_schedule(name, one_by_one)
    assert name not in CATALOGUE


@pytest.mark.parametrize("chunks", [0, -1, 1.5, "two", True])
def test_chunks_are_a_number_of_stages(chunks: Any) -> None:
    with pytest.raises(ScheduleError, match="chunks is not a whole number of at least 1"):
        register_schedule("odd", one_by_one, chunks=chunks)
    assert "odd" not in CATALOGUE


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda s, m, d: one_by_one(s, m + 1, d), "returned a schedule of 5 micro-batches for 4 micro-batches"),
        (lambda s, m, d: one_by_one(s + 1, m, d), "returned a schedule of 3 stages for 2 stages"),
        (lambda s, m, d: None, "returned None, not a Schedule"),
        (lambda s, m, d: 1 // 0, "failed for"),
    ],
)
def test_a_builder_that_is_wrong_is_named_with_or_without_a_name(build: Any, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        build_schedule(build, 2, 4)
    register_schedule("wrong", build)
    try:
        with pytest.raises(ScheduleError, match=message):
            build_schedule("wrong", 2, 4)
    finally:
        del CATALOGUE["wrong"]


@pytest.mark.parametrize("counts", [(0, 4), (4, 0), (-1, 4), (2.0, 4), (4, "8"), (True, 4), (4, None)])
def test_counts_that_are_no_counts_are_refused_with_both_numbers(counts: tuple[int, int]) -> None:
    with pytest.raises(ScheduleError, match="whole number of at least 1") as caught:
        build_schedule("gpipe", *counts)
    assert f"n_stages={counts[0]!r}, n_microbatches={counts[1]!r}" in str(caught.value)


@pytest.mark.parametrize(("n_stages", "n_devices"), [(4, 3), (2, 4), (1, 3)])
def test_stages_that_cannot_be_divided_evenly_are_refused_with_numbers_that_can(n_stages: int, n_devices: int) -> None:
    with pytest.raises(
        ScheduleError, match=f"{n_stages} stages? cannot be divided among {n_devices} devices"
    ) as caught:
        build_schedule("gpipe", n_stages, 4, n_devices=n_devices)
    stages, devices = (int(part.split("=")[1]) for part in caught.value.hint.split(" or "))
    assert build_schedule("gpipe", stages, 4, n_devices=n_devices).n_stages == stages
    assert build_schedule("gpipe", n_stages, 4, n_devices=devices).n_devices == devices


@pytest.mark.parametrize("n_devices", [0, -2, 1.5])
def test_a_device_count_that_is_none_is_refused(n_devices: int) -> None:
    with pytest.raises(ScheduleError, match="n_devices is not a whole number"):
        build_schedule("gpipe", 4, 4, n_devices=n_devices)


# -- DAGs of stages ---------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CATALOGUE)
def test_every_schedule_of_a_dag_of_stages_is_legal_and_holds_no_more_than_that_of_a_chain(name: str) -> None:
    """Lowering verifies the program in all models of communication."""
    for seed, (n_stages, n_devices, m) in enumerate(_sample(name, 12)):
        routes = dag(n_stages, seed)
        schedule = build_schedule(name, n_stages, m, n_devices=n_devices, routes=routes)
        if not CATALOGUE[name].has_slices:
            lower(schedule, routes)
        verify(schedule, routes=routes)
        straight = build_schedule(name, n_stages, m, n_devices=n_devices)
        held, most = (in_flight(one.rows, one.placement) for one in (schedule, straight))
        assert all(own <= other for own, other in zip(held, most, strict=True))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CATALOGUE)
def test_the_routes_of_a_chain_change_nothing(name: str) -> None:
    for n_stages, n_devices, m in _sample(name, 8):
        routes = (*chain(n_stages), *((Route("skip", 0, (n_stages - 1,)),) if n_stages > 1 else ()))
        with_routes = build_schedule(name, n_stages, m, n_devices=n_devices, routes=routes)
        assert with_routes == build_schedule(name, n_stages, m, n_devices=n_devices)


@pytest.mark.parametrize("name", ["1f1b", "eager-1f1b", "zb-h1", "zb-h2", "interleaved", "interleaved-zb"])
def test_towers_hold_what_their_depth_needs_in_the_same_time(name: str) -> None:
    routes = tuple(Route(f"v{tower}", tower, (7,)) for tower in range(7))
    schedule, straight = build_schedule(name, 8, 16, routes=routes), build_schedule(name, 8, 16)
    times = [simulate(one, routes=routes).makespan for one in (schedule, straight)]
    assert times[0] <= times[1]
    assert in_flight(schedule.rows, schedule.placement)[0] <= 3
    assert in_flight(straight.rows, straight.placement)[0] >= 8


@pytest.mark.parametrize("name", [name for name, entry in CATALOGUE.items() if entry.by_depth])
def test_a_dag_takes_no_longer_by_depth_if_all_times_are_equal(name: str) -> None:
    for seed in range(12):
        draw = random.Random(f"{name} {seed}")
        n_devices, chunks, m = (
            draw.randint(2, 6),
            1 if CATALOGUE[name].chunks else draw.randint(1, 3),
            draw.randint(1, 16),
        )
        routes = dag(n_devices * chunks, seed)
        both = [
            build_schedule(name, n_devices * chunks, m, n_devices=n_devices, routes=each) for each in (routes, None)
        ]
        by_depth, chain = (simulate(schedule, routes=routes).makespan for schedule in both)
        assert by_depth <= chain * (1 + 1e-9)
