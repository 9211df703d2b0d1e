from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from program_strategies import programs, wild_programs

from pipecompile.errors import InputError, ScheduleError
from pipecompile.ir import Program
from pipecompile.ir.program_text import parse_program
from pipecompile.passes import lower
from pipecompile.schedules import build_schedule

TEXT = """\
program: 2 stages on devices 0 1, 1 micro-batches
route v0: 0 -> 1, 0 bytes, gradient
device 0
  0F0 -> v0#0[0] @0#0[0]
  SEND v0#0[0] to 1
  FREE v0#0[0]
  RECV v0'1#0[0] from 1
  0B0 @0#0[0] v0'1#0[0] ->
  FREE @0#0[0]
  FREE v0'1#0[0]
device 1
  RECV v0#0[0] from 0
  1F0 v0#0[0] -> @1#0[0]
  FREE v0#0[0]
  1B0 @1#0[0] -> v0'1#0[0]
  FREE @1#0[0]
  SEND v0'1#0[0] to 0
  FREE v0'1#0[0]
"""


def test_a_small_program_in_full() -> None:
    program = lower(build_schedule("gpipe", 2, 1))
    assert str(program) == TEXT
    assert parse_program(TEXT) == program


@given(wild_programs())
def test_whatever_the_grammar_can_say_parses_back(program: Program) -> None:
    assert parse_program(str(program)) == program


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs())
def test_lowered_programs_parse_back(program: Program) -> None:
    assert parse_program(str(program)) == program


def test_indentation_and_empty_lines_mean_nothing() -> None:
    assert parse_program(TEXT.replace("\n  ", "\n\n\t")) == parse_program(TEXT)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (TEXT, "", "the text holds no program"),
        ("program: 2", "program 2", "'program 2 stages .*' cannot be read\n  where  line 1"),
        ("0 bytes", "many bytes", "'many' is not a number of bytes\n  where  line 2"),
        ("0 -> 1,", "0 => 1,", "'route v0: 0 => 1, .*' cannot be read\n  where  line 2"),
        (
            "device 0",
            "device 1",
            "'device 1' is out of place\n  where  line 3\n  why    the next device must be 'device 0'",
        ),
        ("device 0\n", "", "'0F0 .*' is out of place\n  where  line 3"),
        ("device 1", "route v1: 0 -> 1, 0 bytes", "'route v1: 0 -> 1, 0 bytes' is out of place\n  where  line 11"),
        ("0F0 ->", "0F0x ->", "'0F0x' is not an action\n  where  line 4"),
        ("0F0 ->", "0F0", "cannot be read\n  where  line 4\n  why    expected something like: 1F0 v0#0 -> v1#0"),
        ("to 1", "to 1 2", "'SEND v0#0\\[0\\] to 1 2' cannot be read\n  where  line 5"),
        ("to 1", "from 1", "'SEND v0#0\\[0\\] from 1' cannot be read\n  where  line 5"),
        ("to 1", "to nobody", "cannot be read\n  where  line 5"),
        (
            "FREE v0#0[0]",
            "FREE v0[0]",
            "'v0\\[0\\]' cannot be read\n  where  line 6\n  why    expected something like: v0#0",
        ),
        ("FREE v0#0[0]", "FREE v0#0[0]x", "'v0#0\\[0\\]x' cannot be read\n  where  line 6"),
        ("FREE v0#0[0]", "FREE", "'FREE' cannot be read\n  where  line 6"),
        ("v0'1#0[0] from", "v0''1#0[0] from", "cannot be read\n  where  line 7"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(ScheduleError, match=message):
        parse_program(TEXT.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1 micro", "999999 micro", "the text has 14 actions and cannot have 999,999 micro-batches"),
        ("2 stages", "999999999 stages", "the text has 14 actions and cannot have 999,999,999 stages"),
    ],
)
def test_counts_that_no_text_can_have_are_refused_at_once(old: str, new: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        parse_program(TEXT.replace(old, new, 1))


def test_a_byte_order_mark_is_read() -> None:
    assert parse_program("\ufeff" + TEXT) == parse_program(TEXT)


PIECES = [
    *"0F1#'[]@ \n->:,",
    "device ",
    "route ",
    "program: ",
    "SEND ",
    "RECV ",
    "FREE ",
    "host",
    " to ",
    "٣",
    "9" * 20,
]


@given(st.integers(0, len(TEXT)), st.integers(0, 30), st.lists(st.sampled_from(PIECES), max_size=5).map("".join))
def test_damaged_text_is_refused_or_read_as_what_it_says(start: int, length: int, piece: str) -> None:
    try:
        program = parse_program(TEXT[:start] + piece + TEXT[start + length :])
    except ScheduleError:
        return
    assert parse_program(str(program)) == program


@pytest.mark.parametrize("text", [None, b"program: 1 stages on devices 0, 1 micro-batches", 3])
def test_what_is_no_text_is_refused(text: object) -> None:
    with pytest.raises(InputError, match="is not the text of a program"):
        parse_program(text)  # type: ignore[arg-type]
