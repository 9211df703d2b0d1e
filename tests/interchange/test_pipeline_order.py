"""Orders are data: their text is read back, their cells know their partners, and nothing of a file is dropped."""

from __future__ import annotations

from pathlib import Path

import pytest

import pipecompile as pc
from pipecompile.errors import InputError
from pipecompile.interchange.pipeline_order import EMPTY, OrderCell, PipelineOrder
from pipecompile.interchange.torch_csv import parse_cell, parse_torch_csv


@pytest.mark.parametrize(
    ("cell", "partner"),
    [("0SEND_F3", "1RECV_F3"), ("1RECV_F3", "0SEND_F3"), ("2SEND_B0", "1RECV_B0"), ("1RECV_B0", "2SEND_B0")],
)
def test_a_message_has_a_partner_on_the_neighbouring_stage(cell: str, partner: str) -> None:
    assert str(parse_cell(cell).partner) == partner


def test_the_computations_are_a_schedule() -> None:
    order = parse_torch_csv("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    assert order.has_communication
    assert order.schedule == pc.build_schedule("1f1b", 2, 1)
    assert repr(order) == "PipelineOrder('csv', n_ranks=2, with communication)"


def test_an_idle_tick_has_no_text_and_an_empty_row_is_a_comma() -> None:
    row = (OrderCell(0, "F", 0), EMPTY, OrderCell(0, "B", 0))
    assert str(PipelineOrder((row, ()))) == "0F0,,0B0\n,\n"


def test_a_file_that_cannot_be_written_is_an_input_error(tmp_path: Path) -> None:
    order = parse_torch_csv("0F0,0B0\n")
    order.save(tmp_path / "order.csv")
    assert pc.read_schedule(tmp_path / "order.csv") == order
    with pytest.raises(InputError, match="cannot be written"):
        order.save(tmp_path / "missing" / "order.csv")
