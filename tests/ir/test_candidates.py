"""The table of candidates as text: aligned columns with one unit each, the chosen candidate and reasons at the right."""

from __future__ import annotations

from pipecompile.ir.candidates import WIDTH, Candidate, Considered, candidate_columns

CONSIDERED = Considered(
    (
        Candidate(2, "1f1b", (True, False), 1e-3, 4e-3, (2.0**20, 2.0**21)),
        Candidate(4, "gpipe", (True, True), 2e-3, 0.01, (3 * 2.0**20,)),
        Candidate(8, left_out="stage 1 needs 9 GiB"),
    ),
    chosen=0,
)

TABLE = """\
3 candidates, 2 fit
 micro-  bottleneck  step  peak  schedule  recomputed
batches          ms    ms   MiB            stages
────────────────────────────────────────────────────────────────────────────────────
      2        1.00   4.0  2.00  1f1b      0           chosen
      4        2.00  10.0  3.00  gpipe     all
      8                                                left out: stage 1 needs 9 GiB"""


def test_str_is_a_table_without_trailing_spaces() -> None:
    assert str(CONSIDERED) == TABLE


def test_a_long_reason_is_wrapped_below_itself() -> None:
    out = Candidate(8, left_out=" ".join(["reason"] * 30))
    lines = str(Considered((*CONSIDERED.rows, out), 0)).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert " ".join(lines).count("reason") == 30
    assert lines[-1].startswith(" " * lines[-2].index("reason"[0]))


def test_a_column_without_a_known_number_is_empty() -> None:
    columns = candidate_columns(Considered((Candidate(8), Candidate(9)), 1))
    assert [cells for name, cells in columns.items() if name.startswith("step")] == [["", ""]]
    assert columns[""] == ["", "chosen"]


def test_best_is_the_chosen_candidate() -> None:
    assert CONSIDERED.best.schedule == "1f1b"


def test_a_single_candidate_is_singular() -> None:
    assert str(Considered((Candidate(1, "gpipe"),), 0)).startswith("1 candidate, 1 fits\n")


def test_repr_is_one_line() -> None:
    assert repr(CONSIDERED).startswith("Considered(n_candidates=3, chosen=Candidate(n_microbatches=2, schedule='1f1b'")
    assert "\n" not in repr(CONSIDERED) + repr(CONSIDERED.best)
