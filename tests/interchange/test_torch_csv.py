"""The CSV of torch.distributed.pipelining keeps every cell: 1,000 programs are read as they were written."""

from __future__ import annotations

from random import Random

import pytest
from drawn_orders import drawn_order
from torch_generators import WAITS, multi_order, with_communication, written

from pipecompile.errors import ScheduleError
from pipecompile.interchange.order_report import check_order
from pipecompile.interchange.torch_csv import parse_torch_csv
from pipecompile.schedules import build_schedule


@pytest.mark.sampled(10)
@pytest.mark.parametrize("block", range(20))
def test_a_thousand_programs_are_read_as_they_were_written(block: int) -> None:
    for seed in range(50 * block, 50 * block + 50):
        order = drawn_order(Random(seed))
        assert parse_torch_csv(str(order)) == order


@pytest.mark.parametrize(
    ("cls_name", "name"), [("ScheduleInterleaved1F1B", "interleaved"), ("ScheduleDualPipeV", "dualpipev-overlap")]
)
def test_what_torch_dumps_is_written_back_letter_by_letter(cls_name: str, name: str) -> None:
    ours = build_schedule(name, 8, 8, n_devices=4)
    text = written(with_communication(multi_order(cls_name, 4, 2, 8), ours.placement, 8))
    order = parse_torch_csv(text)
    assert str(order) == text.replace("\r\n", "\n")
    assert order.schedule == ours
    ops = {cell.op for _, _, cell in order.cells()}
    assert {"UNSHARD", "RESHARD", "REDUCE_GRAD", *WAITS, "SEND_B", "RECV_F"} <= ops
    assert ("OVERLAP_F_B" in ops) == (name == "dualpipev-overlap")
    assert check_order(order).is_sound


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0\n", r"line 1, cell 2: '0X0' is not a cell"),
        ("0F0,0SEND_F\n", "'0SEND_F' is not a cell"),
        ("0F0,0UNSHARD3\n", "'0UNSHARD3' is not a cell"),
        ("(0F0;0UNSHARD)OVERLAP_F_B\n", "overlaps an action that computes nothing"),
        ("()OVERLAP_F_B\n", "overlaps an action that computes nothing"),
        ("0UNSHARD\n", "there is no action"),
        ("0F0\n\n1F0\n", "a line is blank"),
        ("0F99999999999\n", "is not a cell"),
    ],
)
def test_what_is_no_cell_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        parse_torch_csv(text)
