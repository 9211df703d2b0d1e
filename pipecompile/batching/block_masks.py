"""Block masks of `flex_attention` as inputs: their tensors, and the tensors that their functions close over, are cut along the batch.

mask_mod = lambda b, h, q, k: docs[b, q] == docs[b, k]      docs is cut along dimension 0, since the batch index selects there
mask_mod = lambda b, h, q, k: table[q, k]                   table is shared by all micro-batches
mask_mod = lambda b, h, q, k: b > 0                         cannot be cut: in a micro-batch, b counts from 0 again

A function becomes a pytree node: its code is structure, and the values that it closes over are leaves. So a new function of the same code,
made for each mini-batch, needs no new recording.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CellType, FunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pipecompile.errors import described
from pipecompile.torch_private import pytree
from pipecompile.torch_private.fx_graphs import register_pytree_flatten_spec

__all__ = [
    "FunctionLayout",
    "FunctionShell",
    "batch_use",
    "closure_ranges",
    "function_shell",
    "is_block_mask",
    "is_of_mask",
    "mask_dims",
    "with_cells",
]

_VALUELESS = (
    "new_ones",
    "new_zeros",
    "new_full",
    "new_empty",
    "new_tensor",
    "ones_like",
    "zeros_like",
    "dim",
    "size",
    "__get__",
)
"""Calls whose result does not depend on the values of a tensor."""

_MARK = "is of a block mask"

_MODULE = "torch.nn.attention.flex_attention"


def is_block_mask(value: object) -> bool:
    """Return whether a value is a BlockMask, without an import of `flex_attention`."""
    return type(value).__name__ == "BlockMask" and type(value).__module__ == _MODULE


# -- functions as pytree nodes ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class FunctionLayout:
    """A function without the contents of the variables `names` that it closes over."""

    function: FunctionType
    names: tuple[str, ...]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FunctionLayout):
            return NotImplemented
        one, two = self.function, other.function
        same = one.__code__ == two.__code__ and one.__globals__ is two.__globals__ and self.names == other.names
        return same and _defaults(one) == _defaults(two)

    def __hash__(self) -> int:
        return hash((self.function.__code__, self.names))


def _defaults(function: FunctionType) -> list[Any]:
    """Return the defaults in a form to compare: plain values, and the ids of others."""
    values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
    return [value if isinstance(value, (int, float, str, type(None))) else id(value) for value in values]


@dataclass(frozen=True, slots=True)
class FunctionShell:
    """A function as a pytree node: its layout, and the contents of its variables."""

    layout: FunctionLayout
    values: tuple[Any, ...] = field(repr=False)


def with_cells(function: FunctionType, names: Sequence[str], contents: Sequence[Any]) -> FunctionType:
    """Return a copy of a function with other contents of these variables."""
    given = dict(zip(names, contents, strict=True))
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    closure = tuple(CellType(given[name]) if name in given else cell for name, cell in cells)
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__, copy.__qualname__ = function.__kwdefaults__, function.__qualname__
    return copy


def function_shell(function: FunctionType, convert: Callable[[Any], Any] = lambda value: value) -> FunctionShell:
    """Return a function as a shell, with `convert` applied to the leaves that it closes over."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    contents = {name: cell.cell_contents for name, cell in cells if _is_full(cell)}
    contents = {name: content for name, content in contents.items() if content is not function}
    template = with_cells(function, [*contents], [None] * len(contents))
    values = tuple(pytree.tree_map(convert, content) for content in contents.values())
    return FunctionShell(FunctionLayout(template, tuple(contents)), values)


def _is_full(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 an empty cell raises
    except ValueError:
        return False
    return True


def _built(layout: FunctionLayout, contents: Sequence[Any]) -> FunctionType:
    """Return a function of a mask with these contents, marked as one whose contents are inputs."""
    function = with_cells(layout.function, layout.names, contents)
    function.__dict__[_MARK] = True
    return function


def is_of_mask(value: object) -> bool:
    """Return whether a function comes from a mask among the inputs, so that the values that it closes over are inputs."""
    return isinstance(value, FunctionType) and _MARK in value.__dict__


def _flatten(value: Any) -> tuple[list[Any], FunctionLayout]:
    shell = value if isinstance(value, FunctionShell) else function_shell(value)
    return list(shell.values), shell.layout


def _flatten_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], FunctionLayout]:
    values, layout = _flatten(value)
    return list(zip(map(pytree.GetAttrKey, layout.names), values, strict=True)), layout


pytree.register_pytree_node(
    FunctionShell,
    _flatten,
    lambda values, layout: _built(layout, list(values)),
    serialized_type_name="pipecompile.FunctionShell",
    flatten_with_keys_fn=_flatten_with_keys,
)
register_pytree_flatten_spec(FunctionShell, lambda value, _spec: _flatten(value)[0])


# -- the batch index in a mask --------------------------------------------------------------------------------------------


def closure_ranges(spec: pytree.TreeSpec, start: int = 0) -> Iterator[tuple[int, int, pytree.TreeSpec]]:
    """Yield (first leaf, end, structure) of each function in a structure; functions inside of functions belong to them."""
    if spec.type is FunctionShell:
        yield start, start + spec.num_leaves, spec
        return
    for child in pytree.children_of_spec(spec):
        yield from closure_ranges(child, start)
        start += child.num_leaves


def mask_dims(
    dims: Sequence[int | None | type[list[Any]]], leaves: Sequence[Any], spec: pytree.TreeSpec
) -> tuple[tuple[int | None | type[list[Any]], ...], str]:
    """Return batch dimensions of leaves, in functions of masks those by which the batch index selects; and a line that hinders a cut."""
    result, line = list(dims), ""
    for start, end, structure in closure_ranges(spec):
        own = leaves[start:end]
        rows, other = batch_use(pytree.tree_unflatten(list(own), structure))
        result[start:end] = [0 if id(leaf) in rows else None for leaf in own]
        known = {id(leaf) for leaf in own}
        foreign = [place for key, place in rows.items() if key not in known]
        line = line or other or (f"{foreign[0]}, from a tensor that it does not close over" if foreign else "")
    return tuple(result), line


def batch_use(function: Callable[..., Any]) -> tuple[dict[int, str], str]:
    """Return the ids of the tensors that the batch index of a `mask_mod` selects from, with the line, and the line of another use.

    The function runs once, on indices that are 0.
    """
    indices = [torch.zeros((), dtype=torch.long) for _ in range(4)]
    watch = _BatchWatch(indices[0])
    try:
        with torch.no_grad(), watch:
            function(*indices)
    except Exception as error:  # the user's own: the mask cannot be analysed, and is not cut
        return {}, watch.other or f"{_place(getattr(function, '__code__', None))} raises {described(error)}"
    return watch.rows, watch.other


class _BatchWatch(TorchFunctionMode):
    """Notes what the batch index selects from, in `rows`, and the line of its first other use, in `other`."""

    def __init__(self, batch: torch.Tensor) -> None:
        super().__init__()
        self.batch, self.rows, self.other = batch, dict[int, str](), ""
        self.kept: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_read = getattr(func, "__name__", "") not in _VALUELESS
        if is_read and any(leaf is self.batch for leaf in pytree.tree_leaves((args, kwargs or {}))):
            frame = inspect.currentframe()
            user = frame.f_back if frame is not None else None
            line = _place(user.f_code if user else None, user.f_lineno if user else 0)
            index = args[1] if func is torch.Tensor.__getitem__ else ()
            index = index if isinstance(index, tuple) else (index,)
            others = [leaf for leaf in (*index[1:], *args[:1]) if leaf is self.batch]
            if func is torch.Tensor.__getitem__ and index[0] is self.batch and not others:
                self.rows[id(args[0])] = line
                self.kept.append(args[0])
            else:
                self.other = self.other or line
        return func(*args, **(kwargs or {}))


def _place(code: Any, line: int = 0) -> str:
    """Return a line of a function of the user."""
    if code is None:
        return "mask_mod"
    return f"{code.co_filename}:{line or code.co_firstlineno} in {code.co_name}"
