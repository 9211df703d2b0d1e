from __future__ import annotations

import pytest

from pipecompile.ir.program_text import parse_program
from pipecompile.verifiers.lifetimes import lifetime_faults

HEADER = "program: 1 stages on devices 0, 2 micro-batches\ndevice 0\n"


def faults(row: str, *, frees: bool = True, slots: bool = True) -> list[str]:
    return lifetime_faults(parse_program(HEADER + row.replace("; ", "\n")), frees=frees, slots=slots)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("0F0 -> a#0[0]; 0B0 a#0[0] ->; FREE a#0[0]", []),
        ("0F0 -> a#0[0]; FREE a#0[0]; 0F1 -> a#1[0]; FREE a#1[0]", []),
        ("0B0 a#0[0] ->", ["device 0, step 0, 0B0 a#0[0] ->: a#0 is not on this device yet"]),
        (
            "0F0 a#0[0] -> a#0[0]; FREE a#0[0]",
            ["device 0, step 0, 0F0 a#0[0] -> a#0[0]: a#0 is not on this device yet"],
        ),
        (
            "0F0 -> a#0[0]; FREE a#0[0]; SEND a#0[0] to 1; FREE a#0[0]",
            [
                "device 0, step 2, SEND a#0[0] to 1: a#0 is freed already, at step 1",
                "device 0, step 3, FREE a#0[0]: a#0 is freed already, at step 1",
            ],
        ),
        ("0F0 -> a#0[0]", ["device 0: a#0, written at step 0, is never freed"]),
        (
            "0F0 -> a#0[0]; RECV a#0[1] from 1; FREE a#0[0]",
            ["device 0, step 1, RECV a#0[1] from 1: a#0 is written already, at step 0"],
        ),
        (
            "0F0 -> a#0[0]; 0F1 -> a#1[0]; FREE a#0[0]; FREE a#1[0]",
            ["device 0, step 1, 0F1 -> a#1[0]: a#1[0] still holds a#0, written at step 0 and not freed"],
        ),
        (
            "0F0 -> a#0[0]; 0B0 a#0[1] ->; FREE a#0[0]",
            ["device 0, step 1, 0B0 a#0[1] ->: a#0 is in a#0[0], not in a#0[1]"],
        ),
        (
            "0F0 -> a#0; FREE a#0",
            ["device 0, step 0, 0F0 -> a#0: a#0 has no slot"],
        ),
    ],
)
def test_each_step_out_of_turn_is_named_with_its_place(row: str, expected: list[str]) -> None:
    assert faults(row) == expected


def test_what_is_not_assigned_yet_is_not_asked_for() -> None:
    assert faults("0F0 -> a#0; 0B0 a#0 ->", frees=False, slots=False) == []
    assert faults("0F0 -> a#0; 0F1 -> a#1; FREE a#0; FREE a#1", slots=False) == []
