from __future__ import annotations

import pytest

import pipecompile as pc
from pipecompile.errors import ScheduleError

TEXT = """periodic program: 1 stages on devices 0, 7 micro-batches, 4 times 1 later
device 0
 prologue
  (
   0F0 -> @0#0
   FREE @0#0
  )x3+1
 period
  0F3 -> @0#3
  FREE @0#3
 epilogue
"""


def test_a_group_is_read_back_as_all_its_instructions() -> None:
    program = pc.PeriodicProgram.from_text(TEXT)
    ((*prologue,),) = program.prologue
    assert [str(i) for i in prologue] == [
        "0F0 -> @0#0",
        "FREE @0#0",
        "0F1 -> @0#1",
        "FREE @0#1",
        "0F2 -> @0#2",
        "FREE @0#2",
    ]
    assert str(program) == TEXT


def test_the_text_of_a_long_prologue_is_short() -> None:
    """A prologue of 1f1b on P devices has up to P forwards, and was written one by one."""
    few, many = (str(pc.lower_periodic(pc.build_periodic("1f1b", devices, 200))) for devices in (8, 16))
    assert len(many.splitlines()) < 2.5 * len(few.splitlines())
    assert str(pc.PeriodicProgram.from_text(many)) == many


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (")x3+1", ")x3", r"'\)x3' ends no group\n  where  line 7"),
        (")x3+1", ")x0+1", r"\)x0\+1 is not a number of repetitions"),
        (")x3+1", ")x3+0", r"\)x3\+0 is not a number of repetitions"),
        (")x3+1", ")x999999999+1", "is not a number of repetitions"),
        ("  )x3+1\n", "", "'period' is out of place\n  where  line 7"),
        ("  (\n", "", r"'\)x3\+1' ends no group"),
        ("  (\n", "  (\n  (\n", r"'\(' is out of place\n  where  line 5"),
        ("device 0\n", "(\ndevice 0\n", r"'\(' is out of place"),
        (" epilogue\n", " epilogue\n  (\n  0B0 @0#0 ->\n", "a device has no prologue, period and epilogue"),
        ("FREE @0#3", "FREI @0#3", "line 10"),
    ],
)
def test_a_group_out_of_place_is_refused(old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(ScheduleError, match=message):
        pc.PeriodicProgram.from_text(TEXT.replace(old, new, 1))


def test_groups_that_no_memory_holds_are_refused() -> None:
    group = "  (\n   0F0 -> @0#0\n  )x90000000+1\n"
    with pytest.raises(ScheduleError, match="repeats too much"):
        pc.PeriodicProgram.from_text(TEXT.replace(" period\n", f"{group}{group} period\n"))
