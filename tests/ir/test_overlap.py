from __future__ import annotations

from pipecompile.ir import Action, Schedule
from pipecompile.ir.overlap import firsts, grouped, in_order, is_pair, parse_cell, written_cells

ROW = tuple(map(Action.parse, ("0F0", "0F1", "0B0", "0B1")))
PAIR = ROW[1], ROW[2]


def test_a_pair_is_a_forward_and_a_backward() -> None:
    assert is_pair(PAIR)
    assert in_order(PAIR[::-1]) == in_order(PAIR) == PAIR
    assert not is_pair(ROW[:2])
    assert in_order(ROW[3:1:-1]) == ROW[3:1:-1]


def test_cells_are_written_and_read() -> None:
    cells = list(written_cells(ROW, {PAIR}))
    assert cells == ["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"]
    assert [parse_cell(cell) for cell in cells] == list(grouped(ROW, {PAIR})) == [ROW[:1], PAIR, ROW[3:]]
    assert firsts({PAIR}) == {ROW[1]}
    assert Schedule.from_rows([cells]) == Schedule.from_rows([[ROW[0], PAIR, ROW[3]]])
