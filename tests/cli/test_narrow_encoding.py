"""Output where the encoding of stdout lacks characters of the tables."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from pipecompile.cli.narrow_encoding import print_what_can_be_encoded


@pytest.mark.parametrize(
    ("encoding", "text", "written"),
    [
        ("ascii", "── 3 µs ▶ 2 → ▶ …", b"-- 3 us > 2 -> > ..."),
        ("ascii", "layer é", b"layer ?"),
        ("latin-1", "── 3 µs ▶ é", "-- 3 µs > é".encode("latin-1")),
        ("utf-8", "── 3 µs", "── 3 µs".encode()),
        ("ascii", "path \udcff─", b"path \xff-"),
    ],
)
def test_what_an_encoding_lacks_is_written_as_the_nearest_text(
    monkeypatch: pytest.MonkeyPatch, encoding: str, text: str, written: bytes
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    print_what_can_be_encoded()
    sys.stdout.write(text)
    sys.stdout.flush()
    assert raw.getvalue() == written


def test_a_table_is_printed_without_a_locale() -> None:
    environment = os.environ | {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "pipecompile", "env"]
    ended = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=100)
    assert (ended.returncode, b"Error" in ended.stderr) == (0, False)
    assert b"----" in ended.stdout


@pytest.mark.parametrize(
    ("closed", "model", "code"), [(">&-", "1f1b", 0), ("2>&-", "nope", 2), (">&- 2>&-", "nope", 2)]
)
def test_a_closed_stream_changes_no_exit_code(closed: str, model: str, code: int) -> None:
    command = f"{sys.executable} -m pipecompile schedule {model} --stages 2 --microbatches 2 {closed}"
    ended = subprocess.run(["sh", "-c", command], capture_output=True, check=False, timeout=100)
    assert (ended.returncode, b"Traceback" in ended.stderr) == (code, False)
