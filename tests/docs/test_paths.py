"""Files, folders, links and modules that the pages name exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)
FROM_USERS = {
    "out/",
    "dist/",
    "llama/",
    "checkpoint/",
    "mine.py",
    "train.py",
    "train_on_ray.py",
    "elastic.py",
    "copies.py",
}
"""Folders and files that examples on the pages write or read."""

WITHOUT_LINKS = {"CONTRIBUTING.md", "CHANGELOG.md", "options.md"}

page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)


def text_of(path: Path) -> str:
    return re.sub(r"<!--.*?-->", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def prose_of(path: Path) -> str:
    """Return the page without fenced blocks."""
    return re.sub(r"^( *)```.*?^\1```$", "", text_of(path), flags=re.DOTALL | re.MULTILINE)


def exists(name: str, path: Path) -> bool:
    """Return whether a name is a path from the page, the repository, the package, or the name of any file of these."""
    if any((base / name).exists() for base in (path.parent, ROOT, ROOT / "pipecompile")):
        return True
    return "/" not in name and any(
        any((ROOT / folder).rglob(name)) for folder in ("pipecompile", "benchmarks", "examples")
    )


@page
def test_files_exist(page: Path) -> None:
    names = {
        name for name in re.findall(r"(?<![\w/.])[\w.][\w./-]*\.py\b", text_of(page)) if "NAME" not in name
    } - FROM_USERS
    assert not sorted(name for name in names if not exists(name, page))


@page
def test_folders_exist(page: Path) -> None:
    names = set(re.findall(r"`([\w.][\w./-]*/)`", prose_of(page))) - FROM_USERS
    assert not sorted(name for name in names if not exists(name, page))


@page
def test_links_lead_to_files_and_headings(page: Path) -> None:
    missing = []
    targets = re.findall(r"\]\(((?!https?:)[^)\s]+)\)", text_of(page))
    assert targets or page.name in WITHOUT_LINKS
    for target in targets:
        name, _, heading = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists() or (heading and heading not in headings(file)):
            missing.append(target)
    assert not missing


def headings(path: Path) -> set[str]:
    """Return the anchors of a page: headings in lower case, hyphens for spaces."""
    lines = re.findall(r"^#+ (.+)$", text_of(path), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in lines}


@page
def test_dotted_names_can_be_imported(page: Path) -> None:
    for name in sorted(set(re.findall(r"\bpipecompile(?:\.[A-Za-z_]\w*)+(?![\w/])", text_of(page)))):
        assert resolves(name), name


def resolves(name: str) -> bool:
    first, *rest = name.split(".")
    found: object = importlib.import_module(first)
    for depth, part in enumerate(rest, start=1):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join(name.split(".")[: depth + 1]))
            except ImportError:
                return False
        found = getattr(found, part)
    return True
