"""The documentation site builds without warnings and without the network, and has every public name."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

import pipecompile as pc
import pipecompile.ir

DOCS = Path(__file__).parents[2] / "docs"


def refuse(*_: object) -> None:
    raise OSError("the site is built without the network")


def test_the_site_builds_without_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("furo")
    pytest.importorskip("myst_parser")
    build_main = pytest.importorskip("sphinx.cmd.build").build_main
    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert build_main(["-q", "-W", "--keep-going", "-b", "html", str(DOCS), str(tmp_path)]) == 0
    written = {path.stem for path in tmp_path.glob("*.html")}
    assert written >= {path.stem for path in DOCS.glob("*.md")}
    links = re.findall(r'href="(\.\./[^"]*)"', "".join(path.read_text() for path in tmp_path.glob("*.html")))
    assert not links, "links that leave the site"


def test_the_reference_has_every_public_name() -> None:
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"auto(?:function|class|exception):: (\w+)", text)) == sorted(pc.__all__)


def test_every_page_is_in_the_contents() -> None:
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    pages = [page for block in re.findall(r"```\{toctree\}\n(.*?)```", text, re.DOTALL) for page in block.split()]
    assert {path.stem for path in DOCS.glob("*.md")} - {"index"} <= set(pages)


def test_the_grammar_is_that_of_the_source() -> None:
    grammar = (pipecompile.ir.__doc__ or "").partition("Grammar of a schedule and of a program:\n\n")[2].rstrip()
    assert grammar
    assert "\n".join(line[4:] for line in grammar.split("\n")) in (DOCS / "ir.md").read_text(encoding="utf-8")


def test_every_warning_has_a_row() -> None:
    """Each beginning on the page is a text of the package; NAME stands for a name, numbers for numbers."""
    page = (DOCS / "exactness.md").read_text(encoding="utf-8").partition("| it begins |")[2]
    shown = [
        text for row in re.findall(r"^\| (`[^|]*`) \|", page, re.MULTILINE) for text in re.findall(r"`([^`]+)`", row)
    ]
    assert len(shown) > 15
    source = "".join(path.read_text(encoding="utf-8") for path in (DOCS.parent / "pipecompile").rglob("*.py"))
    for text in shown:
        words = re.sub(r"^(NAME|stage \d+|(lists of )?\d+ samples) ", "", text)
        assert words in source, text
