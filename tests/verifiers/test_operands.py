from __future__ import annotations

import pytest

from pipecompile.ir.program_text import parse_program
from pipecompile.verifiers.operands import operand_faults

LEGAL = """\
program: 3 stages on devices 0 1 2, 1 micro-batches
route x: host -> 0, 8 bytes
route a: 0 -> 1 2 host, 8 bytes, gradient
device 0
  0F0 x#0 -> a#0 @0.r#0
  0R0 @0.r#0 x#0 -> @0#0
  0B0 @0#0 a'1#0 a'2#0 a'host#0 ->
device 1
  1F0 a#0 -> @1#0
  1B0 @1#0 -> a'1#0
device 2
  2F0 a#0 -> @2#0
  2I0 @2#0 -> a'2#0 @2.w#0
  2W0 @2.w#0 ->
"""


def test_what_the_routes_say_is_legal() -> None:
    assert operand_faults(parse_program(LEGAL)) == []


@pytest.mark.parametrize(
    ("old", "new", "faults"),
    [
        ("0F0 x#0 ->", "0F0 ->", ["0F0 must read x#0"]),
        ("-> a#0 @0.r#0", "-> @0.r#0", ["0F0 must write a#0"]),
        ("-> a#0 @0.r#0", "-> a#0 @0#0", ["0F0 must not write @0#0", "0F0 must write @0.r#0"]),
        ("0R0 @0.r#0 x#0 ->", "0R0 @0.r#0 ->", ["0R0 must read x#0"]),
        ("x#0 -> @0#0", "x#0 -> a#0 @0#0", ["0R0 must not write a#0"]),
        ("a'1#0 a'2#0 a'host#0 ->", "a'2#0 ->", ["0B0 must read a'1#0", "0B0 must read a'host#0"]),
        ("2I0 @2#0 -> a'2#0", "2I0 @2#0 -> a'1#0", ["2I0 must not write a'1#0", "2I0 must write a'2#0"]),
        ("-> a'2#0 @2.w#0", "-> a'2#0", ["2I0 must write @2.w#0"]),
        ("2W0 @2.w#0", "2W0 @2#0 @2.w#0", ["2W0 must not read @2#0"]),
        ("1F0 a#0", "1F0 a#0 a#0", ["1F0 reads a#0 more than once"]),
        ("1B0 @1#0", "1B0 @1#0 @1#0", ["1B0 reads @1#0 more than once"]),
        ("  1B0 @1#0 -> a'1#0\n", "", ["1F0 must not write @1#0"]),
    ],
)
def test_what_is_missing_and_what_is_too_much_is_named(old: str, new: str, faults: list[str]) -> None:
    assert old in LEGAL
    assert operand_faults(parse_program(LEGAL.replace(old, new))) == faults


SUMMED = """\
program: 3 stages on devices 0 1 1, 1 micro-batches
route a: 0 -> 1 2, 8 bytes, gradient, sums 2+1
device 0
  0F0 -> a#0 @0#0
  0B0 @0#0 a'1#0 ->
device 1
  1F0 a#0 -> @1#0
  2F0 a#0 -> @2#0
  2I0 @2#0 -> a'2#0 @2.w#0
  2W0 @2.w#0 ->
  1B0 @1#0 a'2#0 -> a'1#0
"""


@pytest.mark.parametrize(
    ("old", "new", "faults"),
    [
        ("", "", []),
        ("1B0 @1#0 a'2#0 ->", "1B0 @1#0 ->", ["1B0 must read a'2#0"]),
        ("0B0 @0#0 a'1#0 ->", "0B0 @0#0 a'1#0 a'2#0 ->", ["0B0 must not read a'2#0"]),
        (", sums 2+1", "", ["0B0 must read a'2#0", "1B0 must not read a'2#0"]),
    ],
)
def test_a_sum_is_read_once_by_the_stage_that_sends_it(old: str, new: str, faults: list[str]) -> None:
    assert operand_faults(parse_program(SUMMED.replace(old, new))) == faults
