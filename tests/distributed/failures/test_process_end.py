from __future__ import annotations

import os
import sys
import threading

import pytest

from pipecompile.distributed.failures import board_watch, process_end
from pipecompile.distributed.failures.failure_report import FailureReport
from pipecompile.distributed.failures.process_end import note_end, report_uncaught, require_process
from pipecompile.errors import InputError, RunError


def test_an_uncaught_exception_is_shown_and_posted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reporter:
        def report_outside(self, error: BaseException) -> bool:
            posted.append(error)
            return True

        def wait_for_readers(self, error: BaseException | None = None, since: float | None = None) -> None:
            waits.append(error)

        def note_thread(self, name: str, error: BaseException) -> None:
            noted.append((name, error))

    noted: list[object] = []
    shown: list[object] = []
    waits: list[object] = []
    posted: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda *args: shown.append(args[1]))
    in_threads: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda given: in_threads.append(given.exc_value))
    monkeypatch.setattr(process_end, "_HOOKS", [])
    reporter = Reporter()
    report_uncaught(reporter)
    report_uncaught(reporter)
    error = ValueError("bad record 7")
    sys.excepthook(ValueError, error, None)
    assert posted == [error]
    sys.excepthook(KeyboardInterrupt, interrupt := KeyboardInterrupt(), None)
    assert posted == [error, interrupt]
    assert waits == [error, interrupt]
    assert shown == [error, interrupt]
    thread = threading.Thread(name="loader")
    threading.excepthook(threading.ExceptHookArgs((ValueError, error, None, thread)))
    assert noted == [("loader", error)]
    assert in_threads == [error]
    assert posted == [error, interrupt]


def test_all_pipelines_post_an_exception_before_one_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks with several pipelines waited for each other, each at another one, for ten seconds per pipeline, before."""

    class Reporter:
        def report_outside(self, error: BaseException) -> bool:
            done.append("post")
            if error.args == ("lost store",):
                raise error
            return True

        def note_thread(self, name: str, error: BaseException) -> None:
            """Do nothing."""

        def wait_for_readers(self, error: BaseException | None = None, since: float | None = None) -> None:
            done.append("wait")
            starts.add(since)

    done: list[str] = []
    starts: set[float | None] = set()
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    monkeypatch.setattr(process_end, "_HOOKS", [])
    reporters = [Reporter() for _ in range(3)]
    for reporter in reporters:
        report_uncaught(reporter)
    sys.excepthook(ValueError, ValueError("bad record 7"), None)
    assert done == ["post"] * 3 + ["wait"] * 3
    assert len(starts) == 1
    assert starts != {None}
    done.clear()
    sys.excepthook(ValueError, ValueError("lost store"), None)
    assert done == ["post"] * 3


def test_the_end_of_a_script_is_noted_with_what_ended_it(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[str] = []
    monkeypatch.setattr(process_end, "_NOTES", [noted.append])
    note_end(noted.append)
    process_end._note()
    try:
        sys.exit(3)
    except SystemExit:
        process_end._note()
    assert noted == ["its script has ended"] * 2 + ["its script has ended by SystemExit: 3"] * 2


def test_an_exception_that_another_hook_has_shown_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others were told that the script had ended, and not by what."""
    noted: list[str] = []
    monkeypatch.setattr(process_end, "_NOTES", [noted.append])
    monkeypatch.setattr(sys, "last_value", ValueError("bad record 7"), raising=False)
    process_end._note()
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    process_end._note()
    assert noted == ["its script has ended by ValueError: bad record 7", "its script has ended"]


def test_an_uncaught_exception_is_noted_before_others_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    monkeypatch.setattr(process_end, "_HOOKS", [])
    monkeypatch.setattr(process_end, "_NOTES_OF_ERRORS", [])
    process_end.note_uncaught(noted.append)
    report_uncaught(reporter := Reporter())
    error = ValueError("bad record 7")
    sys.excepthook(ValueError, error, None)
    assert noted == [error]
    assert reporter.said == ["report", "wait"]


class Reporter:
    """What is told of an exception, in order."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def report_outside(self, error: BaseException) -> bool:
        self.said.append("report")
        return True

    def wait_for_readers(self, error: BaseException | None = None, since: float | None = None) -> None:
        self.said.append("wait")

    def note_thread(self, name: str, error: BaseException) -> None:
        self.said.append("thread")


def test_a_script_that_ends_by_an_exception_without_a_text_leaves_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others were told that the process was killed."""

    class Mute(Exception):
        def __str__(self) -> str:
            raise LookupError

    noted: list[str] = []
    monkeypatch.setattr(process_end, "_NOTES", [noted.append])
    try:
        raise Mute
    except Mute as error:
        process_end._note()
        posted = FailureReport.of(error, 1).what
    assert noted == ["its script has ended by Mute: (its text cannot be written: LookupError)"]
    assert posted == "Mute: (its text cannot be written: LookupError)"


def test_a_forked_process_and_an_ending_interpreter_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require_process(os.getpid(), 1)
    with pytest.raises(InputError, match="a pipeline of rank 1 is called in a process forked from it"):
        require_process(os.getpid() + 1, 1)
    monkeypatch.setattr(board_watch, "has_ended", lambda: True)
    with pytest.raises(RunError, match="while the interpreter ends"):
        require_process(os.getpid(), 1)
