"""docs/distributed.md and the pages that go on with its script: their code runs on two ranks, from top to bottom."""

from __future__ import annotations

from pathlib import Path

from tests.support.torchrun import torchrun

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / name for name in ("distributed.md", "rank_state.md", "rank_failures.md")]


def test_the_code_of_the_pages_runs_on_two_ranks(tmp_path: Path) -> None:
    script = ROOT / "tests" / "support" / "page_on_ranks.py"
    printed = torchrun(2, script, *map(str, PAGES), cwd=tmp_path)
    blocks = sum(page.read_text(encoding="utf-8").count("```python") for page in PAGES)
    assert printed.count(f"{blocks} blocks") == 2, printed  # lines of two ranks may run into each other
    assert (tmp_path / "out" / "00000100" / ".metadata").exists()
    assert (tmp_path / "out" / "timeline.json").exists()
