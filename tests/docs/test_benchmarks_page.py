"""The page of the benchmarks names every script and every result."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")


def test_every_script_is_named() -> None:
    scripts = [
        path.name for path in FOLDER.glob("*.py") if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    ]
    assert [name for name in sorted(scripts) if f"`{name}`" not in PAGE] == []


def test_every_result_is_linked() -> None:
    assert [
        path.name for path in sorted((FOLDER / "results").glob("*.md")) if f"(results/{path.name})" not in PAGE
    ] == []
