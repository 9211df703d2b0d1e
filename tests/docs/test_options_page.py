"""docs/options.md is what its command writes, and has every keyword of `compile`."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path

import pipecompile as pc

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_what_the_command_writes() -> None:
    spec = importlib.util.spec_from_file_location("options_page", DOCS / "options.py")
    assert spec is not None
    assert spec.loader is not None
    command = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(command)
    assert (DOCS / "options.md").read_text(encoding="utf-8") == command.page(), "python docs/options.py"


def test_every_keyword_has_a_row_with_its_default() -> None:
    lines = (DOCS / "options.md").read_text(encoding="utf-8").splitlines()
    for name, parameter in list(inspect.signature(pc.compile).parameters.items())[2:]:
        rows = [line for line in lines if line.startswith(f"| `{name}` |")]
        assert len(rows) == 1, name
        assert f"| `{parameter.default!r}` |" in rows[0]
