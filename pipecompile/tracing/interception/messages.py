"""Is a text made for people only? Then a size in it need not be the very number, and binds no recording.

torch._assert(x.dim() == 3, f"... got {x.shape}")     for people
raise ValueError(f"... {n}"), assert ok, f"{n}"       for people
logger.warning(f"{n}"), warnings.warn(str(n))         for people
table[f"head_{n}"]                                    not: the text decides what is computed
"""

from __future__ import annotations

import ast
import linecache
from functools import lru_cache
from itertools import islice
from types import FrameType

__all__ = ["for_people"]

_TELLING = frozenset(
    "_assert _check _check_value _check_is_size print warn warn_once warning warning_once info info_once debug error "
    "exception critical log".split()
)

Place = tuple[int, int]


def for_people(frame: FrameType) -> bool:
    """Is what this frame is just evaluating part of a message?"""
    line, end_line, column, end_column = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    if line is None or end_line is None or column is None or end_column is None:
        return False
    return any(
        start <= (line, column) and (end_line, end_column) <= end for start, end in _messages(frame.f_code.co_filename)
    )


@lru_cache(maxsize=64)
def _messages(file: str) -> tuple[tuple[Place, Place], ...]:
    """Where messages are in a file: from and to, as line and column."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    return tuple(_span(part) for node in ast.walk(tree) for part in _told(node))


def _told(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Raise):
        return [node.exc] if node.exc else []
    if isinstance(node, ast.Assert):
        return [node.msg] if node.msg else []
    if isinstance(node, ast.Call) and _name(node.func) in _TELLING:
        return [*node.args, *(keyword.value for keyword in node.keywords)]
    return []


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _span(node: ast.expr) -> tuple[Place, Place]:
    return (node.lineno, node.col_offset), (node.end_lineno or node.lineno, node.end_col_offset or 0)
