"""Writes docs/options.md: the keywords of `compile`, from its signature and docstring.

python docs/options.py          a test compares: the page cannot go stale
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pipecompile

PAGE = Path(__file__).with_suffix(".md")

HEAD = """# The keywords of `compile`

`pipecompile.compile(model, n_stages, **keywords)`. Every keyword is checked before anything is traced, measured or moved; a
refused one raises InputError, ScheduleError or PlanError with a text to paste. `help(pipecompile.compile)` shows the same text.
Schedules by name are in [schedules.md](schedules.md), ranks in [distributed.md](distributed.md).
"""


def page() -> str:
    """Return the whole text. Written by docs/options.py."""
    groups = re.findall(r"^\*\*([\w-]+)\*\*\n\n(.*?)(?=^\*\*|^\w)", _docstring(), re.DOTALL | re.MULTILINE)
    parts = [HEAD, *(f"\n## {name}\n\n" + "\n".join(_rows(text)) + "\n" for name, text in groups)]
    return "".join(parts) + "\nWritten by `python docs/options.py`.\n"


def _docstring() -> str:
    return inspect.getdoc(pipecompile.compile) or ""


def _rows(text: str) -> Iterator[str]:
    """Yield the table of a group: a row per keyword."""
    yield "| keyword | type | default | |"
    yield "|---|---|---|---|"
    parameters = inspect.signature(pipecompile.compile).parameters
    for name, meaning in re.findall(r"^- `(\w+)`: (.*?)(?=^- `|\Z)", text, re.DOTALL | re.MULTILINE):
        kind, default = str(parameters[name].annotation), parameters[name].default
        cells = (f"`{name}`", f"`{kind}`", f"`{default!r}`", " ".join(meaning.split()))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
