"""The pages are true: the code of every page runs from top to bottom, and commands print what is shown below them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from unittest.mock import patch

import pytest

from pipecompile.schedules import CATALOGUE

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ELSEWHERE = {"errors.md", "distributed.md"}
"""Pages whose Python has a test of its own: test_errors_page.py, test_distributed_page.py."""

LANGUAGES = {"python", "console", "text", "sh"}
SHELL = ("torchrun --standalone --nproc-per-node=2 examples/", "python examples/", "pip install")
"""Beginnings of commands in `sh` blocks: test_examples.py runs the examples, `make wheel` installs."""


def blocks(page: Path) -> list[tuple[str, int, str]]:
    """Return info string, number of the first line, and text of every fenced block, directives of the site left out."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^( *)```([^\n]*)\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL)
    return [(m[2], text.count("\n", 0, m.start(3)) + 1, m[3]) for m in found if not m[2].startswith("{")]


def python_of(page: Path) -> list[tuple[int, str, str]]:
    """Return line, text and file name of the Python blocks of a page; a block with a file name is a file that commands use."""
    return [
        (line, text, info.partition("file=")[2]) for info, line, text in blocks(page) if info.split()[:1] == ["python"]
    ]


def commands(page: Path) -> list[tuple[str, str]]:
    """Return every `$ command` of the console blocks, and the lines that are shown below it."""
    texts = [text for info, _, text in blocks(page) if info == "console"]
    parts = [part for text in texts for part in re.split(r"^\$ ", text, flags=re.MULTILINE)]
    return [(part.split("\n")[0], part.partition("\n")[2].strip("\n")) for part in parts if part]


def run(command: str, directory: Path) -> str:
    """Return what a command prints, without GPUs. `pipecompile` and `python` are those that run this test."""
    program, *arguments = shlex.split(command)
    start = {"pipecompile": [sys.executable, "-m", "pipecompile"], "python": [sys.executable]}[program]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run([*start, *arguments], cwd=directory, env=environment, capture_output=True, encoding="utf-8", timeout=300, check=False)  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_has_a_language_that_is_tested(page: Path) -> None:
    for info, line, text in blocks(page):
        assert info.partition(" ")[0] in LANGUAGES, f"{page.name}:{line}: {info!r}"
        assert not info.startswith("sh") or text.startswith(SHELL), f"{page.name}:{line}: no test runs {text!r}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in ELSEWHERE and python_of(page)], ids=lambda page: page.name
)
def test_python_blocks_run_in_order(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text in a block `text printed` is what the Python above it prints."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": page.stem}
    with warnings.catch_warnings(), patch.dict(CATALOGUE):  # a page registers a schedule
        warnings.simplefilter("ignore")
        for info, line, text in blocks(page):
            if info.startswith("python"):
                exec(compile("\n" * (line - 1) + text, str(page), "exec"), namespace)
            elif info == "text printed":
                assert_printed(text, capsys.readouterr().out)


def assert_printed(shown: str, printed: str) -> None:
    """Raise AssertionError unless `printed` has the shown text; three dots at the end of a line stand for any text."""
    at = 0
    for part in filter(None, (part.strip("\n") for part in re.split(r"[ \n]*\.\.\.$", shown, flags=re.MULTILINE))):
        assert part in printed[at:], f"printed is\n{printed}"
        at = printed.index(part, at)


@pytest.mark.parametrize(
    ("page", "command", "shown"),
    [(page, *command) for command, page in {command: page for page in PAGES for command in commands(page)}.items()],
    ids=lambda value: value.name if isinstance(value, Path) else value.split("\n")[0],
)
def test_commands_print_what_is_shown(page: Path, command: str, shown: str, tmp_path: Path) -> None:
    program, *arguments = shlex.split(command)
    if program in ("make", "pip"):
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert set(arguments) <= {*targets, "install", "PATH"}
        return
    for _, text, name in python_of(page):
        if name:
            (tmp_path / name).write_text(text, encoding="utf-8")
    if program == "python":
        (tmp_path / "examples").symlink_to(ROOT / "examples")
    if "show out/" in command:  # a file that another command of the page writes
        run(next(other for other, _ in commands(page) if other.endswith("--out out")), tmp_path)
    printed = run(command, tmp_path)
    assert_printed(shown, printed)


def test_the_command_of_the_readme_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"]["pipecompile"] == "pipecompile.cli:main"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120
