"""The pages are true: the code of every page runs from top to bottom, and commands print what is shown below them."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import pipecompile.cli
from pipecompile.schedules import CATALOGUE
from tests.support.small_models import with_small_models

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ELSEWHERE = {"errors.md", "distributed.md", "rank_state.md", "rank_failures.md", "launching.md"}
"""Pages whose Python has a test of its own: test_errors_page.py, test_distributed_page.py, test_launching_page.py."""

LANGUAGES = {"python", "console", "text", "sh"}
SHELL = (
    "torchrun --standalone --nproc-per-node=2 examples/",
    "torchrun --standalone --nproc-per-node=2 train.py",
    "torchrun --nnodes=2 --nproc-per-node=1",
    "torchrun --nnodes=3 --nproc-per-node=2",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=2:3",
    "python examples/",
    "pip install",
)
"""Beginnings of commands in `sh` blocks: test_examples.py and test_launching_page.py run them, `make wheel` installs."""


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


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[[str], str]]:
    """Return a function that runs a `pipecompile` command in an empty folder, and returns what it prints.

    Commands run in this process, which has imported torch already; tests/cli runs commands in processes of their own.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    modules = {*sys.modules}

    def run(command: str) -> str:
        program, *arguments = shlex.split(command)
        assert program == "pipecompile"
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        with torch.random.fork_rng(), warnings.catch_warnings(record=True), pytest.raises(SystemExit) as end:
            pipecompile.cli.main()
        printed = capsys.readouterr()
        assert end.value.code == 0, f"{command}\n{printed.err}"
        return printed.out

    yield run
    for name in {*sys.modules} - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_has_a_language_that_is_tested(page: Path) -> None:
    for info, line, text in blocks(page):
        assert info.partition(" ")[0] in LANGUAGES, f"{page.name}:{line}: {info!r}"
        assert not info.startswith("sh") or text.startswith(SHELL), f"{page.name}:{line}: no test runs {text!r}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in ELSEWHERE and python_of(page)], ids=lambda page: page.name
)
def test_python_blocks_run_in_order(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    pytestconfig: pytest.Config,
) -> None:
    """Text in a block `text printed` is what the Python above it prints. Without `--full`, large models have fewer blocks."""
    monkeypatch.chdir(tmp_path)
    if not pytestconfig.getoption("--full"):
        with_small_models(monkeypatch)
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


def sessions(page: Path) -> list[tuple[tuple[str, str], ...]]:
    """Return the commands of a page with what is shown; one that reads a file in out/ comes with the command before it."""
    grouped: list[tuple[tuple[str, str], ...]] = []
    for command in commands(page):
        grouped.append((*grouped.pop(), command) if " out/" in command[0] else (command,))
    return grouped


@pytest.mark.parametrize(
    ("page", "session"),
    [(page, session) for session, page in {session: page for page in PAGES for session in sessions(page)}.items()],
    ids=lambda value: value.name if isinstance(value, Path) else value[-1][0],
)
def test_commands_print_what_is_shown(
    page: Path, session: tuple[tuple[str, str], ...], tmp_path: Path, run: Callable[[str], str]
) -> None:
    for _, text, name in python_of(page):
        if name:
            (tmp_path / name).write_text(text, encoding="utf-8")
    for command, shown in session:
        program, *arguments = shlex.split(command)
        if program in ("make", "pip"):
            targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
            assert set(arguments) <= {*targets, "install", ".", "torchvision"}
        else:
            assert_printed(shown, run(command))


def test_the_command_of_the_readme_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"]["pipecompile"] == "pipecompile.__main__:main"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120
