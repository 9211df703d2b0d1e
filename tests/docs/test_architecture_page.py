"""docs/architecture.md has the drawings, folders and levels of today's source."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def command() -> ModuleType:
    spec = importlib.util.spec_from_file_location("architecture_page", DOCS / "architecture.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_command_writes(command: ModuleType) -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    assert command.page(text) == text, "stale: run python docs/architecture.py"


def test_every_folder_has_a_row() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    package = DOCS.parent / "pipecompile"
    folders = [path.parent.relative_to(package).as_posix() for path in package.rglob("__init__.py")]
    assert not [folder for folder in folders if folder != "." and f"| `{folder}/` |" not in text]


def test_a_page_without_markers_is_refused(command: ModuleType) -> None:
    with pytest.raises(ValueError, match="no markers for 'compilation'"):
        command.page("# Architecture\n")


def test_first_sentence_ends_at_a_period_before_a_capital(command: ModuleType) -> None:
    assert (
        command.first_sentence("The graph of `a.b`, e.g. one,\nas a | b. More text.\n\nDetails.")
        == "The graph of `a.b`, e.g. one, as a \\| b"
    )
