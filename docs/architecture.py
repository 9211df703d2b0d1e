"""Writes the generated parts of docs/architecture.md: folders by floors, the drawing of a compilation, the levels of a program.

python docs/architecture.py          a test compares: the page cannot go stale

Floors come from tests/house/test_imports.py, sentences from the docstrings of folders and root modules, drawings from the
docstrings of driver/phases.py and verifiers/program.py. Text outside of the comment markers is written by hand.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).with_suffix(".md")
ROOT = PAGE.parents[1]
PACKAGE = ROOT / "pipecompile"


def page(text: str) -> str:
    """Return `text` with each generated part replaced by its current content."""
    parts = {
        "compilation": _drawing(PACKAGE / "driver" / "phases.py"),
        "folders": "\n".join(_rows()) + "\n",
        "levels of a program": _drawing(PACKAGE / "verifiers" / "program.py"),
    }
    for name, content in parts.items():
        begin, end = f"<!-- {name}: written by docs/architecture.py -->\n", f"<!-- end: {name} -->"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"{PAGE.name} has no markers for {name!r}")
        text = f"{before}{begin}{content}{end}{after}"
    return text


def _drawing(path: Path) -> str:
    """Return the first indented block of a module's docstring as a fenced block."""
    lines = _docstring(path).split("\n\n", 1)[1].split("\n")
    end = next(number for number, line in enumerate(lines) if line and line[0] != " ")
    return "```text\n" + textwrap.dedent("\n".join(lines[:end])).strip("\n") + "\n```\n"


def _rows() -> Iterator[str]:
    yield "| floor | | what it is |"
    yield "|---|---|---|"
    for floor, names in enumerate(_floors()):
        for name in names:
            for path in _modules(name):
                place = path.parent if path.name == "__init__.py" else path
                label = place.relative_to(PACKAGE).as_posix() + "/" * place.is_dir()
                yield f"| {floor} | `{label}` | {first_sentence(_docstring(path))} |"


def _floors() -> tuple[tuple[str, ...], ...]:
    """Return the folders and root modules of every floor, lowest floor first."""
    tree = ast.parse((ROOT / "tests" / "house" / "test_imports.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLOORS":
            floors: tuple[tuple[str, ...], ...] = ast.literal_eval(node.value)
            return floors
    raise ValueError("tests/house/test_imports.py has no FLOORS")


def _modules(name: str) -> list[Path]:
    """Return the files whose docstrings describe a folder and its subfolders, or a root module; none for `__init__`, `__main__`."""
    if name.startswith("__"):
        return []
    module = PACKAGE / f"{name}.py"
    return (
        [module] if module.exists() else sorted((PACKAGE / name).rglob("__init__.py"), key=lambda path: path.parts[:-1])
    )


def first_sentence(docstring: str) -> str:
    """Return the first sentence of a docstring as one line, without its period."""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=[^.])\.(?= [A-Z`]|$)", paragraph, maxsplit=1)[0].replace("|", "\\|")


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
