"""Assertions on the values of tensors: the recording assumes that they hold, and a node checks them in every run.

assert x.isfinite().all()                    the tensor is True
if (boxes[:, 2:] <= boxes[:, :2]).any():     the tensor is False: otherwise the code only raises
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

__all__ = ["asserted_truth", "holds"]

_Statement: TypeAlias = ast.If | ast.Assert


def holds(tensor: torch.Tensor, expected: bool, place: str) -> None:
    """Raise AssertionError unless `tensor` is `expected`: the function of an assertion's node. Saved plans contain its name."""
    if not isinstance(tensor, FakeTensor) and not tensor.is_meta and bool(tensor) != expected:
        raise AssertionError(f"an assertion on the values of a tensor fails at {place}")


def asserted_truth(func: object, frame: FrameType) -> bool | None:
    """Return the truth value of a tensor with which the code at the frame's line does not raise.

    `func` is the call that reads the truth value. Return None if the line is not an assertion.
    """
    if func is torch_assert:
        return True
    if func is not torch.Tensor.__bool__:
        return None
    statement = _statement(frame.f_code.co_filename, frame.f_lineno)
    if statement is None:
        return None
    values = set(_operand_values(statement.test, value=isinstance(statement, ast.Assert)))
    return values.pop() if len(values) == 1 else None


def _statement(file: str, line: int) -> _Statement | None:
    """Return the innermost assertion whose condition is on this line."""
    candidates = [node for node in _assertions(file) if node.test.lineno <= line <= (node.test.end_lineno or 0)]
    return min(candidates, key=lambda node: (node.test.end_lineno or 0) - node.test.lineno, default=None)


@lru_cache(maxsize=64)
def _assertions(file: str) -> tuple[_Statement, ...]:
    """Return the assertions of a file whose lines have no condition that decides anything else."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    branches = [node for node in ast.walk(tree) if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert))]
    deciding_lines = {line for node in branches if not _only_raises(node) for line in _lines(node.test)}
    return tuple(node for node in branches if isinstance(node, (ast.If, ast.Assert)) and _only_raises(node)
                 and deciding_lines.isdisjoint(_lines(node.test)))  # fmt: skip


def _lines(test: ast.expr) -> range:
    return range(test.lineno, (test.end_lineno or test.lineno) + 1)


def _only_raises(node: ast.AST) -> bool:
    """Return whether a statement is an assert, or an `if` whose body ends with an exception."""
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


def _operand_values(test: ast.expr, *, value: bool) -> Iterator[bool]:
    """Yield what each operand of `and`, `or` and `not` has to be, so that the whole is `value` whatever the others are.

    Yield both truth values for an operand whose truth Python does not read once and directly.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _operand_values(test.operand, value=not value)
    elif isinstance(test, ast.BoolOp):
        for operand in test.values:
            yield from _operand_values(operand, value=value)
    elif isinstance(test, (ast.IfExp, ast.NamedExpr, ast.Lambda)) or _is_chained(test) or _reads_items(test):
        yield from (True, False)
    else:
        yield value


def _is_chained(test: ast.expr) -> bool:
    """Return whether it is `a < b < c` or `x in y`, which read a truth value more than once, or of another tensor."""
    return isinstance(test, ast.Compare) and (len(test.ops) > 1 or isinstance(test.ops[0], (ast.In, ast.NotIn)))


def _reads_items(test: ast.expr) -> bool:
    """Return whether it is `any(...)`, `all(...)` or has a comprehension, which read the truth values of their items."""
    return any(isinstance(node, (ast.comprehension, ast.IfExp, ast.BoolOp)) for node in ast.walk(test)) or (
        isinstance(test, ast.Call) and isinstance(test.func, ast.Name)
    )
