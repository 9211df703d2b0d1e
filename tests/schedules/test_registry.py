from __future__ import annotations

import csv
from pathlib import Path

import pytest

from pipecompile.errors import ScheduleError
from pipecompile.schedules import BUILDERS, build_schedule
from pipecompile.simulator import simulate

ROWS = list(csv.DictReader((Path(__file__).parent / "reference.csv").open()))
KNOWN = [row for row in ROWS if row["makespan"]]


def test_the_reference_is_all_there() -> None:
    assert (len(ROWS), len(KNOWN)) == (36, 35)


@pytest.mark.parametrize(
    "row", KNOWN, ids=lambda row: "-".join((row["generator"], row["schedule"], row["P"], row["M"]))
)
def test_the_simulated_schedule_is_the_one_of_other_generators(row: dict[str, str]) -> None:
    timeline = simulate(build_schedule(row["schedule"].lower(), int(row["P"]), int(row["M"])))
    assert timeline.makespan == float(row["makespan"]) == float(row["formula_makespan"])
    assert timeline.span == float(row["span_max"])
    assert timeline.bubble == pytest.approx(float(row["bubble_frac"]), abs=5e-5)
    assert timeline.peak_in_flight == tuple(map(float, row["peak_W_per_rank"].split()))
    assert max(timeline.peak_in_flight) == float(row["peak_W_max"])


@pytest.mark.parametrize("name", BUILDERS)
def test_a_schedule_knows_its_name_and_counts(name: str) -> None:
    schedule = build_schedule(name, 3, 5)
    assert (schedule.name, schedule.n_stages, schedule.n_microbatches, schedule.n_devices) == (name, 3, 5, 3)


def test_an_unknown_name_lists_those_known() -> None:
    with pytest.raises(
        ScheduleError, match="no schedule is called 'zigzag'\n  try    one of 'gpipe', '1f1b', 'forward'"
    ):
        build_schedule("zigzag", 2, 2)


@pytest.mark.parametrize("counts", [(0, 4), (4, 0), (-1, 4), (2.0, 4), (4, "8"), (True, 4), (4, None)])
def test_counts_that_are_no_counts_are_refused_with_both_numbers(counts: tuple[int, int]) -> None:
    with pytest.raises(ScheduleError, match="whole number, at least 1") as caught:
        build_schedule("gpipe", *counts)
    assert f"n_stages={counts[0]!r}, n_microbatches={counts[1]!r}" in str(caught.value)


@pytest.mark.parametrize(("n_stages", "n_devices"), [(4, 3), (2, 4), (1, 3)])
def test_stages_that_cannot_be_dealt_out_evenly_are_refused_with_numbers_that_can(
    n_stages: int, n_devices: int
) -> None:
    with pytest.raises(ScheduleError, match=f"{n_stages} stages cannot be dealt to {n_devices} devices") as caught:
        build_schedule("gpipe", n_stages, 4, n_devices=n_devices)
    stages, devices = (int(part.split("=")[1]) for part in caught.value.hint.split(" or "))
    assert build_schedule("gpipe", stages, 4, n_devices=n_devices).n_stages == stages
    assert build_schedule("gpipe", n_stages, 4, n_devices=devices).n_devices == devices


@pytest.mark.parametrize("n_devices", [0, -2, 1.5])
def test_a_device_count_that_is_none_is_refused(n_devices: int) -> None:
    with pytest.raises(ScheduleError, match="n_devices must be a whole number"):
        build_schedule("gpipe", 4, 4, n_devices=n_devices)
