"""`hang` names the instruction at which ranks of a program hang, and refuses files that are none."""

from __future__ import annotations

import pytest

from tests.support.flight_recordings import Fault, Stop, record
from tests.support.hand_cells import program


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The current folder, with the program and the dumps of two ranks, of which rank 1 stops in step 2."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dumps").mkdir()
    own = program()
    own.save("program.txt")
    record(own, 3, Fault(Stop.HOST, 1, 1, 2)).write(tmp_path / "dumps")
    return tmp_path


@pytest.mark.usefixtures("files")
def test_the_rank_that_is_the_cause_is_named(real):
    outcome = real("hang", "dumps", "--program", "program.txt")
    assert outcome.code == 0, outcome.err
    assert "cause: rank 1: it has not launched SEND h'1#0[0] to 0 (result of 1B0)" in outcome.out
    data = real("hang", "dumps/nccl_trace_rank_0", "dumps/nccl_trace_rank_1", "--program", "program.txt", "--json").json
    assert data["causes"][0]["rank"] == 1
    assert {place["rank"]: place["state"] for place in data["places"]} == {0: "begun on the GPU", 1: "not launched"}


def test_without_a_certain_cause_the_code_is_1(real, files):
    for path in files.glob("dumps/*"):
        path.unlink()
    record(program(), 3, Fault(Stop.HOST, 1, 1, 1)).write(files / "dumps", ring=2)
    outcome = real("hang", "dumps", "--program", "program.txt")
    assert outcome.code == 1
    assert "no rank is certain to be the cause" in outcome.out


def test_ranks_can_be_given(real, files):
    for path in files.glob("dumps/*"):
        path.unlink()
    record(program(), 3, Fault(Stop.HOST, 1, 1, 1)).write(files / "dumps", ranks=(9, 4))
    outcome = real("hang", "dumps", "--program", "program.txt", "--ranks", "9,4")
    assert "cause: rank 4" in outcome.out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("dumps",), 2, "--program"),
        (("dumps", "--program", "missing.txt"), 2, "the program cannot be read"),
        (("missing_0", "--program", "program.txt"), 2, "the dump cannot be read"),
        (("program.txt", "--program", "program.txt"), 2, "has no rank"),
        (("dumps", "--program", "program.txt", "--ranks", "0,x"), 2, "is not a list of ranks"),
        (("dumps", "--program", "program.txt", "--ranks", "0"), 2, "not the 2 ranks"),
        (("dumps", "--program", "fault.txt"), 5, "is not legal"),
    ],
    ids=str,
)
def test_mistakes_are_named(real, files, words, code, message):
    text = (files / "program.txt").read_text()
    (files / "fault.txt").write_text(text.replace("  SEND h#0[0] to 1\n", ""))
    outcome = real("hang", *words)
    assert (outcome.code, message in outcome.err) == (code, True), outcome.err
