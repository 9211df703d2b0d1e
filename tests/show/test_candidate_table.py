"""The table of candidates in a terminal has the cells of the plain one."""

from __future__ import annotations

from pipecompile.ir.candidates import Candidate, Considered
from pipecompile.show.candidate_table import considered_table
from pipecompile.show.table import render

CONSIDERED = Considered(
    (
        Candidate(2, "1f1b", (True, False), 1e-3, 4e-3, (2.0**21,)),
        Candidate(4, "[b]gpipe", (True, True), 2e-3, 0.01, (3 * 2.0**20,)),
        Candidate(8, left_out="stage 1 needs 9 GiB"),
    ),
    chosen=0,
)


def test_the_cells_are_those_of_the_plain_table() -> None:
    plain, table = str(CONSIDERED).split("\n"), render(considered_table(CONSIDERED)).split("\n")
    assert table[0] == plain[0]
    assert [line.split() for line in table[5:]] == [line.split() for line in plain[4:]]


def test_the_chosen_candidate_is_bold_and_others_left_out_are_dim() -> None:
    assert [row.style for row in considered_table(CONSIDERED).rows] == ["bold", "", "dim"]
