from __future__ import annotations

from pipecompile.ir.certificate import Certificate, relative_gap


def test_the_gap_is_a_share_of_the_step() -> None:
    assert relative_gap(10.0, 9.0) == 0.1
    assert relative_gap(10.0, 11.0) == relative_gap(0.0, 0.0) == 0.0


def test_the_text_says_what_was_proven() -> None:
    assert str(Certificate(24.0, 24.0)) == "makespan 24, lower bound 24, gap 0.0%: optimal"
    assert str(Certificate(24.0, 18.0, is_exact=True)) == "makespan 24, lower bound 18, gap 25.0%"
    assert "nothing was proven exactly, which needs pip install 'pipecompile[exact]'" in str(Certificate(24.0, 18.0))
