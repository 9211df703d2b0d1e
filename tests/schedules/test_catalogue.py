"""Every schedule of every size is legal, as a schedule and as a program under all models of communication; both texts read
back; both simulate to the same times. A part of the sizes; all with `--full`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from pipecompile.ir import Schedule
from pipecompile.ir.program_text import parse_program
from pipecompile.passes import lower
from pipecompile.schedules import CATALOGUE, build_schedule
from pipecompile.simulation.simulator import simulate
from pipecompile.verifiers import verify

MOST_DEVICES, MOST_MICROBATCHES, MOST_CHUNKS = 8, 16, 4


def sizes(name: str) -> Iterator[tuple[int, int, int]]:
    """(stages, devices, micro-batches)"""
    chunks = CATALOGUE[name].chunks
    for n_devices in range(1, MOST_DEVICES + 1):
        for per_device in (chunks,) if chunks else range(1, MOST_CHUNKS + 1):
            for n_microbatches in range(1, MOST_MICROBATCHES + 1):
                yield n_devices * per_device, n_devices, n_microbatches


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_size_is_legal(name: str) -> None:
    for n_stages, n_devices, n_microbatches in sizes(name):
        verify(build_schedule(name, n_stages, n_microbatches, n_devices=n_devices))


@pytest.mark.parametrize("name", CATALOGUE)
def test_lowered_written_and_simulated(name: str, pytestconfig: pytest.Config) -> None:
    every = list(sizes(name))
    some = every if pytestconfig.getoption("--full") else random.Random(name).sample(every, 8)
    for n_stages, n_devices, n_microbatches in some:
        schedule = build_schedule(name, n_stages, n_microbatches, n_devices=n_devices)
        assert Schedule.from_csv(schedule.to_csv()) == schedule
        program = lower(schedule)
        assert parse_program(str(program)) == program
        of_schedule, of_program = (simulate(each, transfer=0.25, saved_bytes=1.0) for each in (schedule, program))
        assert set(of_schedule.spans) == set(of_program.spans)
        assert of_schedule.memory == of_program.memory
        assert of_schedule.peak_in_flight == of_program.peak_in_flight
