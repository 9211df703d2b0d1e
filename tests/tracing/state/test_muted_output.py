"""Muting drops what a thread prints and logs in the block, and nothing else."""

from __future__ import annotations

import logging
import pdb  # noqa: T100
import sys
import warnings
from io import StringIO
from threading import Thread

import pytest

from pipecompile.tracing.state.muted_output import output_muted


def test_prints_and_logs_of_the_thread_are_dropped(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    stream, handle = sys.stdout, logging.Logger.callHandlers
    caplog.set_level(logging.INFO)
    with output_muted():
        with output_muted():
            print("inner")
        print("outer")
        logging.getLogger("training").info("muted")
        logging.getLogger("pipecompile.cost").info("phase")
        print("told", file=sys.stderr)
        other = Thread(target=lambda: (print("other"), logging.getLogger("training").info("other")))
        other.start()
        other.join()
    print("after")
    logging.getLogger("training").info("after")
    assert capsys.readouterr() == ("other\nafter\n", "told\n")
    assert [record.getMessage() for record in caplog.records] == ["phase", "other", "after"]
    assert (sys.stdout, logging.Logger.callHandlers) == (stream, handle)


def test_output_comes_back_after_an_error_and_a_stream_that_the_block_sets_stays(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before, own = sys.stdout, StringIO()
    with pytest.raises(ZeroDivisionError), output_muted():
        print(sys.stdout.encoding, 1 / 0)
    print("heard")
    assert capsys.readouterr().out == "heard\n"
    with output_muted():
        sys.stdout = own
    print("kept")
    sys.stdout = before
    assert own.getvalue() == "kept\n"


def test_warnings_are_told() -> None:
    with pytest.warns(UserWarning, match="careful"), output_muted():
        warnings.warn("careful", UserWarning, stacklevel=1)


def test_a_debugger_speaks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", StringIO("p 6 * 7\nc\n"))
    before = sys.gettrace()
    with output_muted():
        pdb.Pdb(stdin=sys.stdin, stdout=sys.stdout, nosigint=True).set_trace()
        print("muted")
    sys.settrace(before)
    assert "42" in capsys.readouterr().out
