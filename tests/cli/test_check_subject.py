"""`check` takes a model, or the pipeline in a file: what it prints, writes, and its exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipecompile.cli.check_subject import PIPELINE_AT_FAULT, CheckSubject

PIPELINES = Path(__file__).parents[1] / "interchange" / "pipelines"
DEADLOCK = str(PIPELINES / "deferred-receives.csv")


def test_a_deadlock_is_exit_code_5_and_says_which_lines_wait(cli):
    outcome = cli("check", DEADLOCK, "--rules", "pair")
    assert outcome.code == PIPELINE_AT_FAULT
    assert "pair        deadlocks  one queue per pair of ranks" in outcome.out
    assert "rank 0 (line 1), cell 4 0SEND_F1 waits for rank 1 (line 2), cell 4 1RECV_F1" in outcome.out
    assert cli("check", DEADLOCK, "--rules", "buffered").code == 0


def test_a_repaired_file_is_sound(cli, tmp_path: Path):
    path = tmp_path / "mended.csv"
    outcome = cli("check", DEADLOCK, "--repair", str(path))
    assert outcome.code == PIPELINE_AT_FAULT
    assert f"wrote {path}" in outcome.out
    again = cli("check", str(path), "--json")
    assert again.code == 0
    assert again.json["sound"]
    assert {rule["outcome"] for rule in again.json["rules"].values()} == {"runs"}


def test_what_cannot_be_repaired_is_said_and_nothing_is_written(cli, tmp_path: Path):
    broken = tmp_path / "broken.csv"
    broken.write_text("0F0,0B0\n1F0\n")
    outcome = cli("check", str(broken), "--repair", str(tmp_path / "mended.csv"))
    assert outcome.code == PIPELINE_AT_FAULT
    assert "fault: stage 1 never runs B" in outcome.out
    assert "cannot be repaired" in outcome.out
    assert not (tmp_path / "mended.csv").exists()


def test_layouts_and_names_take_counts(cli):
    outcome = cli("check", "deepspeed:TrainSchedule", "--ranks", "3", "--microbatches", "5", "--json")
    assert outcome.code == 0
    assert outcome.json["name"] == "deepspeed:TrainSchedule;ranks=3;microbatches=5"
    assert cli("check", "megatron:Et|tt|L").code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("missing.csv",), "the pipeline cannot be read"),
        ((str(PIPELINES),), "Is a directory"),
        (("deepspeed:Nope",), "DeepSpeed schedule 'Nope' is not known"),
        ((DEADLOCK, "--rules", "fifo"), "rule 'fifo' is not known"),
        ((DEADLOCK, "--ranks", "4"), "the file has its ranks"),
        ((DEADLOCK, "--input", "2x3"), "--input is about a model"),
        ((DEADLOCK, "--repair", "/missing/out.csv"), "the pipeline cannot be written"),
        (("mymodels:small", "--rules", "pair"), "--rules is about a pipeline in a file"),
        (("mymodels:small",), "a model needs its inputs"),
        (("deepspeed:Train",), "'Train' is not known"),
    ],
)
def test_mistakes_are_exit_code_2(cli, words: tuple[str, ...], message: str):
    outcome = cli("check", *words)
    assert outcome.code == 2
    assert message in outcome.err


def test_a_word_is_a_file_or_a_model(tmp_path: Path):
    layout = tmp_path / "layout"
    layout.write_text("Et|L")
    assert CheckSubject(str(layout)).is_pipeline
    assert CheckSubject("any.csv").is_pipeline
    assert not CheckSubject("torchvision:resnet18").is_pipeline
