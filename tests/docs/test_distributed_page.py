"""docs/distributed.md: its code runs on two ranks, from top to bottom."""

from __future__ import annotations

from pathlib import Path

from tests.support.torchrun import torchrun

ROOT = Path(__file__).parents[2]


def test_the_code_of_the_page_runs_on_two_ranks(tmp_path: Path) -> None:
    page = ROOT / "docs" / "distributed.md"
    printed = torchrun(2, ROOT / "tests" / "support" / "page_on_ranks.py", str(page), cwd=tmp_path)
    blocks = page.read_text(encoding="utf-8").count("```python")
    assert printed.count(f"{blocks} blocks") == 2, printed  # lines of two ranks may run into each other
    assert (tmp_path / "out" / "00000100" / ".metadata").exists()
    assert (tmp_path / "out" / "timeline.json").exists()
