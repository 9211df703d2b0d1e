"""docs/schedules.md is what its command writes, and says of every schedule what a reader looks for."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from pipecompile.schedules import CATALOGUE

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_what_the_command_writes() -> None:
    spec = importlib.util.spec_from_file_location("schedules_page", DOCS / "schedules.py")
    assert spec is not None
    assert spec.loader is not None
    command = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(command)
    assert (DOCS / "schedules.md").read_text(encoding="utf-8") == command.page(), "python docs/schedules.py"
    found = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "schedules").iterdir()}
    assert found == command.charts(), "python docs/schedules.py"


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_schedule_has_its_picture_formulas_paper_and_use(name: str) -> None:
    section = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", (DOCS / "schedules.md").read_text(), re.DOTALL | re.MULTILINE)
    assert section is not None
    for part in ("```text\ndevice 0 │", "- **Bubble.** ", "- **Memory.** ", "- **When.** "):
        assert part in section[1], part
    assert name == "forward" or re.search(r" 20\d\d", section[1]), "no paper"
