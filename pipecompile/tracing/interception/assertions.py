"""Assertions on values: what the model takes for granted, the recording takes for granted too, and every run checks.

assert x.isfinite().all()                    the tensor is True
if (boxes[:, 2:] <= boxes[:, :2]).any():     the tensor is False: what follows only raises
    raise ValueError(...)
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from functools import lru_cache
from types import FrameType
from typing import TypeAlias

import torch

from pipecompile.torch_private.modes import FakeTensor
from pipecompile.torch_private.operators import torch_assert

__all__ = ["holds", "taken_for_granted"]

_Statement: TypeAlias = ast.If | ast.Assert


def holds(tensor: torch.Tensor, expected: bool, place: str) -> None:
    """The node of an assertion. Raises AssertionError when it fails."""
    if not isinstance(tensor, FakeTensor) and not tensor.is_meta and bool(tensor) != expected:
        raise AssertionError(f"what {place} takes for granted is not so")


def taken_for_granted(func: object, frame: FrameType) -> bool | None:
    """What a tensor must be whose truth a call asks for at this line, if the code is not to raise; None: it is no assertion."""
    if func is torch_assert:
        return True
    if func is not torch.Tensor.__bool__:
        return None
    statement = _statement(frame.f_code.co_filename, frame.f_lineno)
    if statement is None:
        return None
    answers = set(_answers(statement.test, wanted=isinstance(statement, ast.Assert)))
    return answers.pop() if len(answers) == 1 else None


def _statement(file: str, line: int) -> _Statement | None:
    """The innermost assertion whose condition is on this line."""
    found = [each for each in _assertions(file) if each.test.lineno <= line <= (each.test.end_lineno or 0)]
    return min(found, key=lambda each: (each.test.end_lineno or 0) - each.test.lineno, default=None)


@lru_cache(maxsize=64)
def _assertions(file: str) -> tuple[_Statement, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    found = [node for node in ast.walk(tree) if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert))]
    lines = {line for node in found if not _only_raises(node) for line in _lines(node.test)}
    return tuple(node for node in found if isinstance(node, (ast.If, ast.Assert)) and _only_raises(node)
                 and lines.isdisjoint(_lines(node.test)))  # fmt: skip


def _lines(test: ast.expr) -> range:
    return range(test.lineno, (test.end_lineno or test.lineno) + 1)


def _only_raises(node: ast.AST) -> bool:
    """An assert, or an `if` that ends with an exception."""
    if isinstance(node, ast.Assert):
        return True
    return isinstance(node, ast.If) and not node.orelse and _raises(node.body[-1])


def _raises(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Raise):
        return True
    if isinstance(statement, ast.Assert):
        return isinstance(statement.test, ast.Constant) and not statement.test.value
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or ast.unparse(call.func) not in ("torch._assert", "_assert"):
        return False
    return bool(call.args) and isinstance(call.args[0], ast.Constant) and call.args[0].value is False


def _answers(test: ast.expr, *, wanted: bool) -> Iterator[bool]:
    """What each operand of `and`, `or` and `not` must be for the whole to be as wanted, whatever the others are."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _answers(test.operand, wanted=not wanted)
    elif isinstance(test, ast.BoolOp):
        for operand in test.values:
            yield from _answers(operand, wanted=wanted)
    elif isinstance(test, (ast.IfExp, ast.NamedExpr, ast.Lambda)) or _chained(test) or _builtin(test):
        yield from (True, False)
    else:
        yield wanted


def _chained(test: ast.expr) -> bool:
    """`a < b < c` and `x in y` ask for truth more than once, or of something else."""
    return isinstance(test, ast.Compare) and (len(test.ops) > 1 or isinstance(test.ops[0], (ast.In, ast.NotIn)))


def _builtin(test: ast.expr) -> bool:
    """`any(...)`, `all(...)` and comprehensions ask for the truth of their items."""
    return any(isinstance(node, (ast.comprehension, ast.IfExp, ast.BoolOp)) for node in ast.walk(test)) or (
        isinstance(test, ast.Call) and isinstance(test.func, ast.Name)
    )
