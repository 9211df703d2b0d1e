"""The package's source as the house tests read it: files, syntax trees, and imports wherever they stand in a file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "pipecompile"

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Import:
    """`importer` imports `imported`, both dotted module names, on line `line` of `path`."""

    importer: str
    imported: str
    path: Path
    line: int

    def __str__(self) -> str:
        return f"{where(self.path, self.line)}: {self.importer} imports {self.imported}"


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


@cache
def paths() -> tuple[Path, ...]:
    """Return every Python file of the package."""
    return tuple(sorted(PACKAGE.rglob("*.py")))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def module_names() -> dict[str, Path]:
    """Return the dotted name of every module of the package."""
    return {module_name(path): path for path in paths()}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def functions(path: Path) -> Iterator[FunctionNode]:
    yield from (node for node in ast.walk(tree_of(path)) if isinstance(node, FunctionNode))


def classes(path: Path) -> Iterator[ast.ClassDef]:
    yield from (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef))


@cache
def imports() -> tuple[Import, ...]:
    """Return every import of one module of the package by another; lazy and TYPE_CHECKING imports count like all others."""
    return tuple(edge for path in paths() for edge in _imports_of(path))


def _imports_of(path: Path) -> Iterator[Import]:
    importer = module_name(path)
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            known = [name for name in submodules if name in module_names()]
            names = known if len(known) == len(submodules) else [*known, node.module]
        else:
            continue
        for name in names:
            if name in module_names() and name != importer:
                yield Import(importer, name, path, node.lineno)
