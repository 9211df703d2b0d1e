"""The end of a command: stdout, stderr and exit code."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from pipecompile.__main__ import main
from pipecompile.cli.command_report import CommandReport
from pipecompile.cli.exit_codes import conclude, exit_code
from pipecompile.errors import InfeasibleError, PartitionError, PartitionWarning, PipecompileError, PlanError


def test_blocks_are_parted_by_a_blank_line_and_brackets_are_no_markup(capsys):
    conclude(False, lambda: CommandReport({}, ("[bold]one", "two")))
    assert capsys.readouterr().out == "[bold]one\n\ntwo\n"


def test_numbers_that_json_lacks_are_null(capsys):
    conclude(True, lambda: CommandReport({"loss": float("nan"), "times": (1.0, float("inf"))}, ()))
    assert capsys.readouterr().out == '{"loss":null,"times":[1.0,null]}\n'


def test_stdout_is_given_back_after_an_error(capsys):
    def work() -> CommandReport:
        print("from the model")
        raise PipecompileError("no")

    with pytest.raises(typer.Exit) as ended:
        conclude(False, work)
    assert ended.value.exit_code == 1
    print("after")
    captured = capsys.readouterr()
    assert captured.out == "after\n"
    assert captured.err == "from the model\nPipecompileError: no\n"


def test_every_cut_that_does_not_exist_is_code_4():
    assert [exit_code(kind("x")) for kind in (InfeasibleError, PartitionError, PlanError, PipecompileError)] == [
        4,
        4,
        2,
        1,
    ]


def test_ctrl_c_ends_in_one_line(capsys):
    def work() -> CommandReport:
        raise KeyboardInterrupt

    with pytest.raises(typer.Exit) as ended:
        conclude(False, work)
    assert ended.value.exit_code == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_ctrl_c_while_the_command_line_is_imported_ends_in_one_line(capsys, monkeypatch):
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=lambda name, *_: interrupted(name)), *sys.meta_path])
        patch.delitem(sys.modules, "pipecompile.cli", raising=False)
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 130
    assert capsys.readouterr() == ("", "interrupted\n")


@pytest.mark.parametrize("place", ["commands.conclude", "exit_codes._print_text"])
def test_ctrl_c_beside_the_work_of_a_command_ends_in_one_line(place, capsys, monkeypatch, tmp_path):
    """Before the work, while typer calls the command, and after it, while the report is printed; typer says nothing of either."""
    plan = tmp_path / "schedule.csv"
    plan.write_text("0F0,0B0\n")

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"pipecompile.cli.{place}", interrupted)
    monkeypatch.setattr(sys, "argv", ["pipecompile", "show", str(plan)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_a_warning_names_options_and_no_line_of_ours(capsys):
    def work() -> CommandReport:
        warnings.warn("more than time_limit=40 may close this", PartitionWarning, stacklevel=2)
        warnings.warn("from elsewhere", UserWarning, stacklevel=1)
        return CommandReport({}, ())

    before = warnings.showwarning
    with pytest.warns(UserWarning, match="from elsewhere"):
        conclude(False, work)
    assert warnings.showwarning is before
    assert capsys.readouterr().err == "PartitionWarning: more than --time-limit 40 may close this\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("options", [[], ["--json"], ["--stages", "none", "--json"]])
def test_a_full_disk_behind_stdout_ends_in_one_line(options):
    """It ended in a traceback. Also what is left in the buffer is not written again at the end of the process."""
    command = [
        sys.executable,
        "-m",
        "pipecompile",
        "schedule",
        "1f1b",
        "--stages",
        "4",
        "--microbatches",
        "4",
        *options,
    ]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    if "none" not in options:
        assert ended.stderr == "OSError: the report cannot be written: No space left on device\n"
        assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
