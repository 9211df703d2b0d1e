from __future__ import annotations

import pytest

from pipecompile.distributed.failures.failure_report import (
    AwaitedMessage,
    CopyDisagreement,
    FailureReport,
    StageDisagreement,
    ranks_of_texts,
)
from pipecompile.errors import InputError, RunError


def test_a_report_has_the_stage_and_micro_batch_of_a_run_error() -> None:
    error = RunError("stage 2 failed", stage=2, microbatch=1, where="model.py:3", hint="fix it")
    report = FailureReport.of(error, 1, "at 2F1")
    assert report == FailureReport(1, "stage 2 failed", "model.py:3", "at 2F1", 2, 1, "fix it")
    raised = report.error()
    assert (raised.stage, raised.microbatch, raised.where, raised.hint) == (2, 1, "model.py:3", "fix it")
    assert raised.what == "rank 1 failed at 2F1: stage 2 failed"


@pytest.mark.parametrize(
    ("error", "what", "where"),
    [
        (ValueError("the data are wrong"), "ValueError: the data are wrong", ""),
        (InputError("no samples", where="x"), "InputError: no samples", "x"),
    ],
)
def test_a_report_names_the_type_of_any_other_error(error: Exception, what: str, where: str) -> None:
    report = FailureReport.of(error, 3)
    assert (report.what, report.where, report.stage) == (what, where, None)
    assert report.error().what == f"rank 3 failed: {what}"


def test_the_error_says_which_value_was_awaited_if_the_report_has_no_place() -> None:
    assert FailureReport(1, "it was killed", awaited="h#0").error().where == "waiting for h#0 from rank 1"
    assert FailureReport(1, "it was killed", "model.py:3", awaited="h#0").error().where == "model.py:3"
    assert FailureReport(1, "it was killed").error().where == ""


def test_reports_and_awaited_messages_are_read_back_from_json() -> None:
    report = FailureReport(1, "ü", "w", "at 0F0", 0, 2, "h", "x#1")
    assert FailureReport.from_json(report.to_json()) == report
    awaited = AwaitedMessage(4, "h'1#1", 7)
    assert AwaitedMessage.from_json(awaited.to_json().encode()) == awaited


def test_a_lone_surrogate_in_a_message_does_not_hide_the_error() -> None:
    for error in (ValueError("file \udc80"), RunError("file \udc80", stage=1, microbatch=0, where="\ud800.py:3")):
        report = FailureReport.from_json(FailureReport.of(error, 3).to_json())
        assert "file \\udc80" in report.error().what


def test_ranks_that_disagree_are_told_to_other_copies_without_blame_on_one() -> None:
    """The rank that posted the report was blamed, before."""
    error = CopyDisagreement("the ranks disagree about the step", where="rank 2: a; rank 3: b")
    text = str(FailureReport.from_json(FailureReport.of(error, 2).to_json()).error())
    assert text.startswith(
        "another copy of the pipeline failed: the ranks disagree about the step\n  where  rank 2: a; rank 3: b"
    )


def test_a_disagreement_that_one_rank_does_not_catch_is_its_own_failure() -> None:
    """The others, which went on, were told of another copy of the pipeline, where there was none."""
    error = CopyDisagreement("the ranks disagree about the step", where="rank 0: a; rank 1: b")
    text = str(FailureReport.outside(error, 1, has_copies=False).error())
    assert text.startswith("rank 1 failed outside a step: CopyDisagreement: the ranks disagree about the step\n")
    assert FailureReport.outside(error, 1, has_copies=True) == FailureReport.of(error, 1)
    assert str(FailureReport.outside(ValueError("x"), 1, has_copies=False).error()).startswith(
        "rank 1 failed outside a step: ValueError: x"
    )


def test_ranks_of_one_stage_that_disagree_are_told_to_others_without_blame_on_one() -> None:
    error = StageDisagreement("the copies train other parameters", where="rank 1: (4,); rank 3: none")
    text = str(FailureReport.from_json(FailureReport.of(error, 1).to_json()).error())
    assert text.startswith(
        "the ranks of another stage failed: the copies train other parameters\n  where  rank 1: (4,); rank 3: none"
    )


@pytest.mark.parametrize("error", [RunError("stage 2 failed", stage=2, microbatch=1), CopyDisagreement("other calls")])
def test_an_error_in_a_finally_names_the_exception_before_it(error: Exception) -> None:
    """The other ranks learned of the call in the `finally` alone, before."""

    def load() -> None:
        try:
            raise ValueError("bad record")
        finally:
            raise error

    with pytest.raises(type(error)) as caught:
        load()
    what = FailureReport.outside(caught.value, 1, has_copies=False).what
    assert what.endswith(f"{error.what}, while ValueError: bad record was being handled")  # type: ignore[attr-defined]


def test_ranks_are_listed_by_their_texts() -> None:
    assert ranks_of_texts([4, 5, 7], ["a", "b", "a"]) == "ranks 4, 7: a; rank 5: b"
