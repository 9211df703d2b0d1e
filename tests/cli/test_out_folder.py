"""The folder of --out is checked before the work."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from pipecompile.cli.command_report import CommandReport
from pipecompile.cli.exit_codes import conclude
from pipecompile.cli.out_folder import check_folder, file_of, folder_of
from pipecompile.errors import InputError


def test_a_folder_that_there_is_or_can_be_made_is_taken(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "new" / "deep"):
        check_folder(path)
    assert not (tmp_path / "new").exists()
    assert folder_of("out") == Path("out")


def test_an_empty_path_is_not_the_present_folder() -> None:
    with pytest.raises(typer.BadParameter, match="not a directory"):
        folder_of("")
    with pytest.raises(typer.BadParameter, match="not a file"):
        file_of("")
    assert file_of("plan.json") == Path("plan.json")


def test_a_folder_that_may_be_written_and_takes_no_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/proc is such a folder for root: it was refused once the model had been cut."""

    def refuse(**_: object) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    check_folder(tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("pipecompile.cli.out_folder.TemporaryFile", refuse)
    with pytest.raises(InputError, match=r"(?s)cannot be written.*No such file"):
        check_folder(tmp_path / "x")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("file", "is a file"),
        ("file/x", "is not a directory"),
        ("loop", "is not a directory"),
        ("x" * 300, "too long"),
        ("\ud800", "codec"),
    ],
)
def test_where_no_folder_can_be_nothing_is_begun(tmp_path: Path, name: str, told: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InputError, match=f"(?s)--out .*{told}"):
        check_folder(tmp_path / name)
    begun = []
    with pytest.raises(typer.Exit):
        conclude(False, lambda: begun.append(1) or CommandReport({}, ()), tmp_path / name)
    assert not begun
