"""What is verified of a few repetitions holds for all, and no damage is overlooked that shows in the unrolled schedule or program."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from random import Random

import pytest
from periodic_damages import HOW, damaged

from pipecompile.errors import VerifyError
from pipecompile.ir import HOST, Route, Schedule, chain
from pipecompile.ir.periodic import PeriodicSchedule
from pipecompile.ir.periodic_program import PeriodicProgram
from pipecompile.passes.periodic_lowering import lower_periodic
from pipecompile.schedules.periods import build_periodic
from pipecompile.verifiers import periodic as verifier
from pipecompile.verifiers import verify
from pipecompile.verifiers.periodic import periodic_program_faults, periodic_schedule_faults
from pipecompile.verifiers.program import Level, program_faults
from pipecompile.verifiers.schedule import schedule_faults

NAMES = ("1f1b", "zb-h2", "interleaved", "zbv", "mario", "po-half")


@cache
def subjects(name: str) -> tuple[PeriodicSchedule, tuple[Route, ...], PeriodicProgram]:
    stages = 3 if name in ("1f1b", "zb-h2", "mario") else 4
    schedule = build_periodic(name, stages, 24, n_devices=3 if stages == 3 else 2)
    ends = Route("x", HOST, (0,), gradient=False), Route("y", stages - 1, (HOST,)), Route("skip", 0, (stages - 1,))
    routes = (*chain(stages), *ends)
    return schedule, routes, lower_periodic(schedule, routes)


@pytest.mark.parametrize("how", HOW)
def test_a_damage_is_found_if_and_only_if_it_is_one_of_the_unrolled(how: str, pytestconfig: pytest.Config) -> None:
    verdicts = Counter[bool]()
    for number in range(400 if pytestconfig.getoption("--full") else 12):
        rng = Random(f"{how} {number}")
        schedule, routes, program = subjects(rng.choice(NAMES))
        broken = damaged(rng, schedule, how)
        found = bool(periodic_schedule_faults(broken, routes))
        assert found == bool(schedule_faults(broken.unrolled(), routes)), str(broken)
        other = damaged(rng, program, how)
        is_found = bool(periodic_program_faults(other))
        assert is_found == bool(program_faults(other.unrolled(), Level.LIVENESS)), str(other)
        verdicts.update((found, is_found))
    assert verdicts[True]


def test_what_is_verified_does_not_grow_with_the_repetitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards are 15 repetitions ahead of their backwards, more than are verified."""
    seen: list[int] = []

    def counted(schedule: Schedule, routes: tuple[Route, ...]) -> list[str]:
        seen.append(schedule.n_microbatches)
        return schedule_faults(schedule, routes)

    monkeypatch.setattr(verifier, "schedule_faults", counted)
    monkeypatch.setattr(verifier, "is_legal_schedule", lambda *_: False)
    verify(build_periodic("1f1b", 16, 1_000_000))
    assert max(seen) <= 24


def test_the_limits_are_those_of_the_unrolled_program() -> None:
    schedule, routes, program = subjects("1f1b")
    for subject in (schedule, program):
        verify(subject, routes=routes, in_flight=[3, 2, 1])
        with pytest.raises(VerifyError, match="device 0 has 3 micro-batches in flight, 2 are allowed"):
            verify(subject, routes=routes, in_flight=[2, 2, 1])
    verify(program, memory_limit=300, saved_bytes=100)
    with pytest.raises(VerifyError, match="300 bytes are held, 299 are allowed"):
        verify(program, memory_limit=299, saved_bytes=100)


def test_parts_that_do_not_fit_are_named() -> None:
    schedule, _, program = subjects("1f1b")
    for subject in (schedule, program):
        with pytest.raises(VerifyError, match=r"prologue, period and epilogue have \[2, 3\] rows"):
            verify(replace(subject, epilogue=subject.epilogue[:2]))
        with pytest.raises(VerifyError, match="0 repetitions, each 1 later: at least one of each is needed"):
            verify(replace(subject, repetitions=0))
