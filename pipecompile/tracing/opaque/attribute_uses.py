"""Uses of an attribute in code that names it: reads, and all that may write its tensor.

    self.scale.to(h.dtype)       a read: a method without "_" at the end, and none that returns a view
    self.scale * h               a read: an operator makes a new tensor
    self.rows[0].add_(h)         may write
    update(self.rows, h)         may write: a function gets the tensor
    rows = self.rows             may write: a later statement may do it

The rule looks at syntax only, and takes `.float()` and `.to()` for copies. If code writes a tensor in spite of it, `WatchedState` notices the
write, and the run is refused.
"""

from __future__ import annotations

import ast
from functools import lru_cache
from types import CodeType

from pipecompile.tracing.outlining.function_source import source_of

__all__ = ["is_only_read"]

_FACTS = frozenset({"device", "dtype", "shape", "ndim", "layout", "requires_grad", "is_cuda"})
"""Attributes of a tensor that share no memory with it."""

_VIEWS = frozenset(
    "view view_as reshape reshape_as expand expand_as detach squeeze unsqueeze transpose permute swapaxes swapdims movedim narrow "
    "select chunk split tensor_split unbind unfold unflatten flatten ravel contiguous diagonal t numpy "
    "untyped_storage storage data_ptr".split()
)
"""Methods whose result may share memory with the tensor, so that what follows counts."""


@lru_cache(maxsize=1024)
def is_only_read(code: CodeType, name: str) -> bool:
    """Return whether all uses of attribute `name` in the source of a function are reads; False if there is no source or no use."""
    source = source_of(code)
    if source is None:
        return False
    parents = {child: node for node in ast.walk(source.node) for child in ast.iter_child_nodes(node)}
    if any(isinstance(node, ast.Constant) and node.value == name for node in parents):
        return False  # getattr(self, "scale")
    uses = [node for node in parents if isinstance(node, ast.Attribute) and node.attr == name]
    return bool(uses) and all(_is_read(use, parents) for use in uses)


def _is_read(node: ast.expr, parents: dict[ast.AST, ast.AST]) -> bool:
    """Return whether an expression that shares memory with the tensor is used for its values only."""
    if not isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
        return False
    around = parents[node]
    if isinstance(around, ast.BinOp | ast.UnaryOp | ast.Compare):
        return True
    if isinstance(around, ast.Subscript) and around.value is node:
        return _is_read(around, parents)
    if not isinstance(around, ast.Attribute):
        return False
    call = parents[around]
    if not (isinstance(call, ast.Call) and call.func is around):
        return around.attr in _FACTS or _is_read(around, parents)
    if around.attr in _VIEWS:
        return _is_read(call, parents)
    return not around.attr.endswith("_") and all(keyword.arg not in ("out", None) for keyword in call.keywords)
