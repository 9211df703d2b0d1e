"""Faults of directions, and of actions on the device of another direction."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

import pipecompile as pc
from pipecompile.errors import VerifyError
from pipecompile.ir.directions import Direction
from pipecompile.ir.program import Op
from pipecompile.passes import lower
from pipecompile.verifiers import verify
from pipecompile.verifiers.directions import direction_faults, place_faults

SCHEDULE = pc.build_schedule("chimera", 4, 6)
UP = (3, 2, 1, 0)


def test_a_legal_schedule_has_no_faults() -> None:
    assert not [*direction_faults(SCHEDULE), *place_faults(SCHEDULE)]
    verify(SCHEDULE)
    verify(lower(SCHEDULE))


@pytest.mark.parametrize(
    ("directions", "fault"),
    [
        ((Direction((3, 2, 1), (1, 3, 5)),), "direction 1 places 3 stages, there are 4"),
        ((Direction((3, 2, 1, 4), (1, 3, 5)),), "direction 1 puts stage 3 on device 4, devices are 0 to 3"),
        ((Direction(UP, ()),), "direction 1 has no micro-batch"),
        (
            (Direction((3, 3, 1, 0), (1, 3, 5)),),
            r"direction 1 has the stages on devices \[0, 1, 3\], not \[0, 1, 2, 3\]",
        ),
        ((Direction(UP, (1, 3, 9)),), "a direction has micro-batch 9, micro-batches are 0 to 5"),
        ((Direction(UP, (1, 3, 5)), Direction((0, 1, 2, 3), (5,))), "micro-batch 5 is in directions 2 times"),
        ((), "stage 0 is placed on device 0"),
        ((Direction(UP, (1, 3)),), "0F5 is on device 3, stage 0 is placed on device 0 for micro-batch 5"),
        ([], "directions is "),
    ],
)
def test_faults(directions: Any, fault: str) -> None:
    with pytest.raises(VerifyError, match=fault):
        verify(replace(SCHEDULE, directions=directions))


def test_slices_and_sharding_have_one_copy_of_a_stage() -> None:
    sliced = pc.build_schedule("seq1f1b", 2, 2)
    with pytest.raises(VerifyError, match="a schedule of slices has one copy of each stage"):
        verify(replace(sliced, directions=(Direction((1, 0), (1,)),)))


def test_damaged_programs_are_refused() -> None:
    """Of each message that is left out, doubled, or goes to another device, the verifier says so."""
    program, random_numbers = lower(SCHEDULE), random.Random(0)
    places = [(d, i) for d, row in enumerate(program.rows) for i, one in enumerate(row) if one.op in (Op.SEND, Op.RECV)]
    for d, i in random_numbers.sample(places, 40):
        row, one = program.rows[d], program.rows[d][i]
        others = [peer for peer in range(4) if peer not in (d, one.peer)]
        for changed in ((), (one, one), (replace(one, peer=random_numbers.choice(others)),)):
            rows = (*program.rows[:d], (*row[:i], *changed, *row[i + 1 :]), *program.rows[d + 1 :])
            with pytest.raises(VerifyError):
                verify(replace(program, rows=rows))
    moved = (Direction(UP, (1, 3)),)
    with pytest.raises(VerifyError):
        verify(replace(program, directions=moved))
