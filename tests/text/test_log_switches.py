"""Levels of the loggers by name, and the lines on stderr."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from pipecompile.errors import InputError
from pipecompile.text.log_switches import NAMES, VARIABLE, set_levels

TEXTS = ["+partition,schedule", "partitoin", ""]
CODE = """
import json, os, sys, tempfile, torch

def run():
    import pipecompile as pc
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    pc.compile(model, 2, example_args=(torch.ones(4, 8),), cost="analytic")

def in_child(text):
    with tempfile.TemporaryFile() as errors:
        if not (child := os.fork()):
            os.dup2(errors.fileno(), 2)
            os.environ[sys.argv[1]] = text
            code = 1
            try:
                run()
                code = 0
            finally:
                sys.excepthook(*sys.exc_info()) if code else None
                sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        errors.seek(0)
        return code, errors.read().decode()

print(json.dumps({text: in_child(text) for text in sys.argv[2:]}))
"""
"""Prints the exit status of a program and what it writes to stderr, for each text: in forks, since torch is long to import."""


@pytest.fixture(autouse=True)
def levels_restored(monkeypatch: pytest.MonkeyPatch):
    loggers = [logging.getLogger("pipecompile" if name == "all" else f"pipecompile.{name}") for name in NAMES]
    before = [logger.level for logger in loggers]
    handlers = [*logging.getLogger("pipecompile").handlers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)
    logging.getLogger("pipecompile").handlers[:] = handlers


def test_a_sign_raises_or_lowers_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "+partition, schedule,-run")
    set_levels()
    levels = {
        name: logging.getLogger(f"pipecompile.{name}").level for name in ("partition", "schedule", "run", "trace")
    }
    assert levels == {
        "partition": logging.DEBUG,
        "schedule": logging.INFO,
        "run": logging.ERROR,
        "trace": logging.NOTSET,
    }


def test_nothing_is_set_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    set_levels()
    assert logging.getLogger("pipecompile.partition").level == logging.NOTSET


@pytest.mark.parametrize("text", ["partitoin", "++run", "+", "all,x"])
def test_an_unknown_name_is_an_error_with_the_nearest(text: str) -> None:
    with pytest.raises(InputError, match=VARIABLE):
        set_levels(text)


def test_lines_go_to_stderr_once_even_if_set_twice(capsys: pytest.CaptureFixture[str]) -> None:
    root, others = logging.getLogger(), [*logging.getLogger().handlers]
    root.handlers[:] = []
    try:
        set_levels("all")
        set_levels("all")
        logging.getLogger("pipecompile.schedule").info("a line")
    finally:
        root.handlers[:] = others
    assert capsys.readouterr().err == "pipecompile.schedule: a line\n"


@pytest.fixture(scope="module")
def programs() -> dict[str, tuple[int, str]]:
    done = subprocess.run([sys.executable, "-c", CODE, VARIABLE, *TEXTS], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize(("text", "code"), [*zip(TEXTS, [0, 1, 0], strict=True)])
def test_a_program_is_told_what_the_variable_says(text: str, code: int, programs: dict[str, tuple[int, str]]) -> None:
    status, errors = programs[text]
    assert status == code
    assert ("pipecompile.partition: partition:" in errors) == ("+partition" in text)
    assert ("cutting into 2 stages" in errors) == ("+partition" in text)
    assert ('PIPECOMPILE_LOGS="+partition"' in errors) == (text == "partitoin")
    if not text:
        assert errors == ""
