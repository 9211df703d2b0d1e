"""The root holds what a user imports, and an `__init__` says what its folder is."""

from __future__ import annotations

import ast

import pytest
from source import PACKAGE, ROOT, paths, tree_of, where

ROOT_MODULES = {"__init__.py", "__main__.py", "compiling.py", "pipeline.py", "options.py", "errors.py"}


def test_the_root_has_only_what_a_user_imports() -> None:
    assert {path.name for path in PACKAGE.glob("*.py")} <= ROOT_MODULES


@pytest.mark.parametrize("name", ["passes", "schedules"])
def test_passes_and_schedules_are_found_at_the_top(name: str) -> None:
    assert (ROOT / name).is_symlink()
    assert (ROOT / name).resolve() == PACKAGE / name


def test_every_folder_says_what_it_is() -> None:
    folders = {path.parent for path in paths()}
    silent = [
        str(folder.relative_to(ROOT))
        for folder in sorted(folders)
        if not ast.get_docstring(tree_of(folder / "__init__.py"))
    ]
    assert not silent, f"folders without a docstring in __init__.py: {silent}"


def test_an_init_has_no_logic() -> None:
    """The root's own `__init__` is apart: its table of lazy names is the public surface."""
    lines = []
    for path in paths():
        if path.name == "__init__.py" and path.parent != PACKAGE:
            logic = [node for node in tree_of(path).body if not is_declaration(node)]
            lines += [where(path, node.lineno) for node in logic]
    assert not lines, "an __init__.py has a docstring, imports and __all__ only:\n" + "\n".join(lines)


def is_declaration(node: ast.stmt) -> bool:
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text or isinstance(node, ast.Import | ast.ImportFrom)
