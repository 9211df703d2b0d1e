from __future__ import annotations

from dataclasses import replace

from pipecompile.ir import Tie, chain
from pipecompile.passes.periodic_lowering import lower_periodic
from pipecompile.schedules.periods import build_periodic
from pipecompile.verifiers.array_induction import is_legal_program, is_legal_schedule


def test_many_repetitions_follow_from_few() -> None:
    """Some repetitions are looked at; a million of them would be 10 million instructions."""
    schedule = build_periodic("1f1b", 4, 1_000_000)
    assert is_legal_schedule(schedule, chain(4), 4)
    assert is_legal_program(lower_periodic(schedule), 4)


def test_what_is_not_legal_is_not_shown() -> None:
    schedule = build_periodic("1f1b", 4, 1000)
    program = lower_periodic(schedule)
    assert not is_legal_schedule(replace(schedule, epilogue=((),) * 4), chain(4), 4)
    assert not is_legal_program(replace(program, epilogue=((),) * 4), 4)
    assert not is_legal_program(lower_periodic(schedule, ties=(Tie("w", (0, 3)),)), 4)
