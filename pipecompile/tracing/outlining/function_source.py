"""The syntax tree of a function, found by its code in the file that it comes from."""

from __future__ import annotations

import ast
import linecache
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType

__all__ = ["FunctionSource", "source_of"]

_FILES = 64
"""Files whose trees are kept."""


@dataclass(frozen=True, slots=True)
class FunctionSource:
    """The definition of a function, and the name of the class around it, by which Python mangles private names; "" for none."""

    node: ast.FunctionDef
    class_name: str = ""


def source_of(code: CodeType) -> FunctionSource | None:
    """Return the source of a function; None for code without a file, and for lambdas, generators and coroutines."""
    text = "".join(linecache.getlines(code.co_filename))
    found = _definitions(text).get((code.co_name, code.co_firstlineno)) if text else None
    if found is None or any(isinstance(one, _UNSUITABLE) for one in ast.walk(found.node)):
        return None
    return found


_UNSUITABLE = (ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal)


@lru_cache(maxsize=_FILES)
def _definitions(text: str) -> dict[tuple[str, int], FunctionSource]:
    """Return the functions of a file by name and first line, which is that of the first decorator."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return {}
    found = {}
    pending: list[tuple[ast.AST, str]] = [(tree, "")]
    while pending:
        node, class_name = pending.pop()
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            found[node.name, first] = FunctionSource(node, class_name)
        inner = node.name if isinstance(node, ast.ClassDef) else class_name
        pending += [(child, inner) for child in ast.iter_child_nodes(node)]
    return found
