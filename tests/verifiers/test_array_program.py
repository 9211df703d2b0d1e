"""A program is legal by arrays if and only if the verifier of programs finds no fault."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from periodic_damages import HOW, damaged

from pipecompile.ir import HOST, Route, Tie, chain
from pipecompile.ir.periodic_program import PeriodicProgram
from pipecompile.passes.periodic_lowering import lower_periodic
from pipecompile.schedules.periods import build_periodic
from pipecompile.verifiers.array_program import is_legal
from pipecompile.verifiers.program import Level, program_faults


def program_of(name: str, devices: int, microbatches: int = 12) -> PeriodicProgram:
    stages = devices if name in ("1f1b", "zb-h2", "mario") else 2 * devices
    ends = Route("x", HOST, (0,)), Route("y", stages - 1, (HOST,)), Route("skip", 0, (stages - 1,))
    schedule = build_periodic(name, stages, microbatches, n_devices=devices)
    return lower_periodic(schedule, (*chain(stages), *ends))


PROGRAMS = [program_of(name, 2) for name in ("1f1b", "zb-h2", "interleaved", "zbv", "mario", "po-half")]


@pytest.mark.parametrize("how", HOW)
def test_verdicts_of_damaged_programs_are_those_of_the_verifier(how: str, pytestconfig: pytest.Config) -> None:
    verdicts = Counter[bool]()
    for number in range(600 if pytestconfig.getoption("--full") else 15):
        rng = Random(f"{how} {number}")
        program = damaged(rng, rng.choice(PROGRAMS), how)
        is_right = not program_faults(program.unrolled(), Level.LIVENESS)
        assert is_legal(program.arrays(program.repetitions)) == is_right, str(program)
        verdicts[is_right] += 1
    assert verdicts[False]


@pytest.mark.parametrize(
    "other",
    [
        {"placement": (0, 0)},
        {"placement": (1, 0)},
        {"placement": (0,)},
        {"placement": (0, 2)},
        {"routes": chain(2)},
        {"routes": (Route("v0", 1, (0,)),)},
        {"routes": (*PROGRAMS[0].routes, Route("z", 0, (HOST,)))},
        {"n_stages": 3},
        {"n_stages": 0},
    ],
)
def test_other_routes_or_placements_are_not_legal(other: dict[str, object]) -> None:
    program = replace(PROGRAMS[0], **other)  # type: ignore[arg-type]
    assert program_faults(program.unrolled(), Level.LIVENESS)
    assert not is_legal(program.arrays(program.repetitions))


def test_ties_are_left_to_the_verifier_of_programs() -> None:
    program = lower_periodic(build_periodic("1f1b", 2, 12), ties=(Tie("w", (0, 1)),))
    assert not program_faults(program.unrolled(), Level.LIVENESS)
    assert not is_legal(program.arrays(program.repetitions))
