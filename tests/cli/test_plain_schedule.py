"""`pipecompile schedule`: where its schedule comes from, and pictures of slices."""

from __future__ import annotations

import pytest

from pipecompile.cli.plain_schedule import plain_schedule
from pipecompile.errors import InputError, ScheduleError
from pipecompile.schedules import build_schedule


def test_a_name_a_search_or_a_file(tmp_path):
    build_schedule("terapipe", 2, 2, n_slices=3).save(tmp_path / "mine.csv")
    assert plain_schedule("zbv", 4, 4, None, None, "never") == build_schedule("zbv", 4, 4)
    assert plain_schedule("auto", 2, 2, None, None, "never").n_slices == 1
    assert plain_schedule(str(tmp_path / "mine.csv"), None, 2, None, None, "never").n_slices == 3
    assert plain_schedule("seq1f1b", 2, 2, None, 2, "never") == build_schedule("seq1f1b", 2, 2, n_slices=2)
    assert "0R1.1,0B1.1" in plain_schedule("seq1f1b", 2, 2, None, 2, "always").to_csv()
    assert plain_schedule("seq1f1b", 2, 2, None, 2, "except_last").to_csv().count("R") == 4


@pytest.mark.parametrize("counts", [(3, None, None), (None, 4, None), (None, None, 1)])
def test_counts_that_a_file_does_not_have_are_refused(counts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    build_schedule("1f1b", 2, 2).save("mine.csv")
    assert plain_schedule("mine.csv", 2, 2, 2, None, "never") == build_schedule("1f1b", 2, 2)
    with pytest.raises(InputError, match=r"is not that of mine\.csv, which has 2"):
        plain_schedule("mine.csv", *counts, None, "never")


@pytest.mark.parametrize("name", ["auto", "mine.csv"])
def test_slices_are_for_names(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    build_schedule("1f1b", 2, 2).save("mine.csv")
    with pytest.raises(InputError, match=f"--slices is given together with {name}"):
        plain_schedule(name, 2, 2, None, 2, "never")
    with pytest.raises(ScheduleError, match="zbv has no slices"):
        plain_schedule("zbv", 4, 4, None, 2, "never")


def test_slices_are_drawn_in_columns_of_a_slice(cli, tmp_path):
    outcome = cli("schedule", "seq1f1b", "--stages", "2", "--microbatches", "1", "--slices", "2")
    assert outcome.code == 0
    assert "seq1f1b, 2 stages on 2 devices, 1 micro-batch of 2 slices: makespan 4.5, bubble 33.3%" in outcome.out
    assert "most slices in flight per device: 2 2" in outcome.out
    assert "dev 0  0F0.0 0F0.1 .     .     .     0B0.1------ 0B0.0------" in outcome.out
    assert "0F0.0,0F0.1,0B0.1,0B0.0" in outcome.out
    build_schedule("seq1f1b", 2, 1, n_slices=2).save(tmp_path / "mine.csv")
    assert "dev 1  .     1F0.0 1F0.1 1B0.1------ 1B0.0------" in cli("show", tmp_path / "mine.csv").out


def test_the_files_of_slices(cli, tmp_path):
    data = cli("schedule", "seq1f1b", "--stages", "2", "--slices", "2", "--out", tmp_path, "--json").json
    assert (data["n_microbatches"], data["n_slices"], data["peak_in_flight"]) == (8, 2, [3.0, 2.0])
    assert (tmp_path / "schedule.csv").read_text() == data["csv"]
    page = (tmp_path / "report.html").read_text()
    assert '"whatIf":null' in page
    assert '[0,"F","0.0",' in page
    assert "8 micro-batches of 2 slices" in page
    if (tmp_path / "timeline.svg").exists():
        assert ">0.1<" in (tmp_path / "timeline.svg").read_text()


def test_slices_of_a_schedule_without_are_refused(cli):
    outcome = cli("schedule", "1f1b", "--slices", "2")
    assert outcome.code != 0
    assert "1f1b has no slices" in outcome.err


def test_a_check_of_a_file_of_another_framework_does_not_read_slices(cli, tmp_path):
    build_schedule("seq1f1b", 2, 1, n_slices=2).save(tmp_path / "mine.csv")
    outcome = cli("check", tmp_path / "mine.csv")
    assert outcome.code != 0
    assert "0F0.0" in outcome.err
