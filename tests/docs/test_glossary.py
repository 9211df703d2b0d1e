"""docs/glossary.md: terms are unique, alphabetical, and words of the package's source."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = re.findall(
    r"^\| (?!term \|)([^|]+) \| ([^|]+) \|$", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE
)
TERMS = [term for term, _ in ROWS]


@cache
def source() -> str:
    """Return the package's source in lower case, every run of spaces, underscores and hyphens as one space."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "pipecompile").rglob("*.py")))
    return re.sub(r"[\s_-]+", " ", text.lower())


def test_terms_are_unique_and_alphabetical() -> None:
    assert len(TERMS) > 50
    assert len(set(TERMS)) == len(TERMS)
    assert sorted(TERMS, key=str.lower) == TERMS


@pytest.mark.parametrize("term", TERMS)
def test_a_term_is_a_word_of_the_source(term: str) -> None:
    words = re.sub(r"[\s_-]+", " ", term.lower())
    assert re.search(rf"\b{re.escape(words)}", source()), f"no file of the package says {term!r}: delete its row"


def test_a_meaning_is_one_sentence() -> None:
    assert not [term for term, meaning in ROWS if not meaning.endswith(".") or ". " in meaning.rstrip(".")]
