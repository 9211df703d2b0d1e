"""Schedules are read from our CSV, from files written by hand, and from files of torch.distributed.pipelining."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipecompile.errors import ScheduleError
from pipecompile.ir import Schedule
from pipecompile.ir.schedule_csv import read_rows
from pipecompile.schedules import build_schedule


def test_empty_cells_are_idle_ticks() -> None:
    assert Schedule.from_csv("0F0,,0B0,\n,1F0, ,1B0,,\n") == build_schedule("gpipe", 2, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,2F0garbage\n", "'2F0garbage' is not an action\n  where  row 1 (line 2), cell 2"),
        ("0F0,,2X0\n", "'2X0' is not an action\n  where  row 0 (line 1), cell 3"),
        (
            "0F0,x\n1Y0,1F0\n",
            "'x' is not an action\n  where  row 0 (line 1), cell 2\n         row 1 (line 2), cell 1: '1Y0' is not an action",
        ),
        ("x,y,z,a,b,c,d,e,f,g,h\n", "row 0 (line 1), cell 9: 'f' is not an action\n         and 2 more\n  why "),
        ("0F0,0REDUCE_GRADX\n", "'0REDUCE_GRADX' is not an action\n  where  row 0 (line 1), cell 2"),
        ("0F0,0SEND_F\n", "'0SEND_F' is not an action"),
        ("0F0,0UNSHARD0\n", "'0UNSHARD0' is not an action"),
        ("0F0,(0F1;0B0)OVERLAP\n", "is not an action\n  where  row 0 (line 1), cell 2"),
        ("0F0,(0F1;0B)OVERLAP_F_B\n", "'0B' is not an action\n  where  row 0 (line 1), cell 2"),
        ("", "there is no action"),
        (",,\n\n", "there is no action"),
        ("0SEND_F0\n", "there is no action"),
        ("0F0\n1F0,0B0\n", "stage 0 is on device 0 and on device 1\n  where  row 1 (line 2), action 0B0"),
        ("0F0,2F0\n", "no row holds an action of stage 1\n  why    stages 0 to 2 are expected"),
        ("1F0\n", "no row holds an action of stage 0"),
        ("999999999F0\n", "no row holds an action of stage 0"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)):
        Schedule.from_csv(text)


def test_communication_in_a_file_is_left_out_and_what_overlaps_stays_together() -> None:
    text = """\
0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0WAIT_SEND_F0,0RECV_B1,0B1,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD
1RECV_F0,1F0,1RECV_F1,(1F1;1B0)OVERLAP_F_B,1SEND_B0,1B1,1SEND_B1,1WAIT_SEND_B1
"""
    assert Schedule.from_csv(text).to_csv().splitlines() == [
        "0UNSHARD,0F0,0F1,0B0,0B1,0REDUCE_GRAD,0RESHARD",
        "1F0,(1F1;1B0)OVERLAP_F_B,1B1",
    ]


def test_a_forward_with_a_backward_is_a_pair_and_other_cells_run_one_after_the_other() -> None:
    pair = Schedule.from_csv("0F0,(0B0;0F1)OVERLAP_F_B,0B1\n")
    assert [(str(a), str(b)) for a, b in pair.overlaps] == [("0F1", "0B0")]
    assert pair == Schedule.from_rows([["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"]]) == Schedule.from_csv(str(pair))
    assert pair != Schedule.from_csv("0F0,0F1,0B0,0B1\n")
    assert not Schedule.from_csv("0F0,0I0,(0F1;0W0)OVERLAP_F_B,0B1\n").overlaps


def test_b_and_w_of_one_cell_are_refused() -> None:
    """torch up to 2.5 wrote B where it meant I."""
    message = "0B0 and 0W0 are both there\n  where  row 0 \\(line 1\\)\n  why .*\n  try    0I0 instead of 0B0"
    for text in ("0F0,0F1,0B0,0W0,0B1\n", "0F0,0F1,0B0,0W0,0I1,0W1\n", "0F0,0B0,0I0,0W0\n"):
        with pytest.raises(ScheduleError, match=message):
            Schedule.from_csv(text)


def test_a_byte_order_mark_and_line_ends_of_windows_are_read(tmp_path: Path) -> None:
    path = tmp_path / "marked.csv"
    path.write_bytes(b"\xef\xbb\xbf0F0,0B0\r\n1F0,1B0\r\n\r\n")
    assert Schedule.load(path) == build_schedule("gpipe", 2, 1)


def test_a_blank_line_is_no_device() -> None:
    assert Schedule.from_csv("0F0,0B0\n1F0,1B0\n\n  \n") == build_schedule("gpipe", 2, 1)
    for text in ("0F0,0B0\n\n1F0,1B0\n", "\n0F0,0B0\n1F0,1B0\n", "0F0,0B0\n \n1F0,1B0"):
        with pytest.raises(ScheduleError, match=r"a line is blank\n  where  line \d\n"):
            Schedule.from_csv(text)


def test_a_comma_is_a_device_without_actions() -> None:
    assert [[str(action) for cell in row for action in cell] for row in read_rows("0F0,\n,\n1F0\n")] == [
        ["0F0"],
        [],
        ["1F0"],
    ]


def test_counts_that_no_text_can_have_are_refused_at_once() -> None:
    with pytest.raises(ScheduleError, match="the text has 2 actions and cannot have 1,000,000 micro-batches"):
        Schedule.from_csv("0F0,0F999999\n")
    assert Schedule.from_csv("0F0,0F5\n").n_microbatches == 6
