"""The README is true: its code runs, and its commands print what it shows."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


def blocks(language: str) -> list[tuple[int, str]]:
    """Line number of the first line, and text, of every block in this language."""
    text = README.read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(1)) + 1, match[1]) for match in found]


def commands() -> list[tuple[str, str]]:
    """Every `$ command` of the console blocks, and the lines that are shown below it."""
    parts = [part for _, text in blocks("console") for part in re.split(r"^\$ ", text, flags=re.MULTILINE)]
    return [(part.split("\n")[0], part.partition("\n")[2].strip("\n")) for part in parts if part]


def run(command: str, directory: Path) -> str:
    """What a command prints. `pipecompile` and `python` are those that run this test; there are no GPUs."""
    program, *arguments = shlex.split(command)
    start = {"pipecompile": [sys.executable, "-m", "pipecompile"], "python": [sys.executable]}[program]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run([*start, *arguments], cwd=directory, env=environment, capture_output=True, encoding="utf-8", timeout=300, check=False)  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


def test_python_blocks_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "readme"}
    found = blocks("python")
    assert len(found) > 5
    for line, text in found:
        exec(compile("\n" * (line - 1) + text, str(README), "exec"), namespace)
    assert (tmp_path / "plan.json").exists()
    assert (tmp_path / "out" / "timeline.svg").exists()


@pytest.mark.parametrize(("command", "shown"), commands(), ids=[command for command, _ in commands()])
def test_commands_print_what_is_shown(command: str, shown: str, tmp_path: Path) -> None:
    program, *arguments = shlex.split(command)
    if program == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert set(arguments) <= set(targets)
        return
    if program == "python":
        (tmp_path / "examples").symlink_to(ROOT / "examples")
    printed = run(command, tmp_path)
    at = 0
    for part in filter(None, re.split(r"^\.\.\.$", shown, flags=re.MULTILINE)):
        assert part.strip("\n") in printed[at:], f"printed is\n{printed}"
        at = printed.index(part.strip("\n"), at)


def test_the_command_of_the_readme_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"]["pipecompile"] == "pipecompile.cli:main"
