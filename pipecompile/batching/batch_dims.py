"""The batch dimension of each tensor of a call: the default rule, and the overrides of the user.

Rule: the batch is dimension 0. A tensor without dimensions is shared by all samples. So is a tensor with size 1 there if other
tensors are longer, since eager execution broadcasts it.

`batch_dims` overrides the rule by name: of the parameter that a tensor arrives in (with all its leaves), of one leaf, or of a
container of leaves (`pair_0`, `batch_mask`). The value is a dimension, or None for shared. The most specific name counts. `list`
says that the argument is a list with one entry per sample (sample_lists.py).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

import torch

from pipecompile.batching.offset_rows import is_offsets_beside
from pipecompile.errors import InputError
from pipecompile.text.shown_value import shown

__all__ = [
    "BatchDims",
    "Dims",
    "Slot",
    "apply_batch_dims",
    "batch_dims_text",
    "check_arguments",
    "check_batch_dims",
    "common_size",
    "default_dims",
    "dims_of_shapes",
    "parameters_of",
    "scatter",
    "sizes",
    "slots_named",
]

BatchDims = Mapping[str, int | None | type[list[Any]]]
Dims = tuple[int | None | type[list[Any]], ...]
Slot = tuple[str, ...]
"""The names of a leaf, the most specific first."""


def check_batch_dims(batch_dims: BatchDims, forward: Callable[..., Any], extra: Sequence[str] = ()) -> None:
    """Raise InputError for a name that is neither a parameter of `forward` nor in `extra`, and for a value that is not a dimension."""
    if not isinstance(batch_dims, Mapping):
        raise InputError(f"batch_dims={shown(batch_dims)} is not a mapping", hint='batch_dims={"mask": None, "src": 1}')
    parameters = parameters_of(forward)
    known = [*parameters, *extra]
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name, dim in batch_dims.items():
        if dim is not None and dim is not list and (isinstance(dim, bool) or not isinstance(dim, int)):
            hint = "a dimension, None for a tensor that all samples share, or list for a list with one entry per sample"
            raise InputError(f"batch_dims[{shown(name)}] is {shown(dim)}", hint=hint)
        if not isinstance(name, str):
            raise InputError(
                f"batch_dims names {shown(name)}, which is not a parameter of forward", hint='batch_dims={"mask": None}'
            )
        if not open_ended and not any(name == one or name.startswith(f"{one}_") for one in known):
            nearest = (get_close_matches(name, known, n=1) or known or [name])[0]
            raise InputError(f"batch_dims names {shown(name)}, which is not a parameter of forward",
                             where="the parameters are " + ", ".join(parameters), hint=batch_dims_text([(nearest, dim)]))  # fmt: skip
        if dim is list and not open_ended and name not in known:
            raise InputError(f"batch_dims[{shown(name)}] is list, but {name} is not a whole argument",
                             where="the parameters are " + ", ".join(parameters), hint=batch_dims_text([(known[0], dim)]))  # fmt: skip


def check_arguments(option: str, names: Iterable[str], forward: Callable[..., Any]) -> None:
    """Raise InputError for a name in an option that is not a parameter of `forward`."""
    parameters = parameters_of(forward)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in names:
        if name not in parameters:
            nearest = (get_close_matches(name, parameters, n=1) or [*parameters, name])[0]
            raise InputError(f"{option} names {shown(name)}, which is not a parameter of forward",
                             where="the parameters are " + ", ".join(parameters), hint=f'{option}={{"{nearest}": ...}}')  # fmt: skip


def parameters_of(forward: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a forward; `*args, **kwargs` for one in C++, which has no signature."""
    try:
        return inspect.signature(forward).parameters
    except ValueError:
        kinds = {"args": inspect.Parameter.VAR_POSITIONAL, "kwargs": inspect.Parameter.VAR_KEYWORD}
        return {name: inspect.Parameter(name, kind) for name, kind in kinds.items()}


def default_dims(leaves: Sequence[Any]) -> Dims:
    """Return the dimensions by the rule: 0 for every tensor with dimensions, None for other leaves."""
    return tuple([0 if isinstance(leaf, torch.Tensor) and leaf.dim() else None for leaf in leaves])


@lru_cache(maxsize=256)
def dims_of_shapes(shapes: tuple[torch.Size, ...]) -> tuple[int, Dims] | None:
    """Return the batch size in samples and the dimensions by the rule, of a call with tensors only; None if that takes a closer look.

    Every step asks, mostly for the shapes of the step before.
    """
    lengths = {shape[0] for shape in shapes if shape}
    if len(lengths) != 1 or 0 in lengths:
        return None
    return lengths.pop(), tuple([0 if shape else None for shape in shapes])


_SPARSE = frozenset({torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})


@lru_cache(maxsize=256)
def sizes(samples: int, count: int) -> tuple[int, ...]:
    """Return the number of samples of each of `count` micro-batches, as `torch.tensor_split` divides them."""
    small, larger = divmod(samples, count)
    return tuple([small + (i < larger) for i in range(count)])


def scatter(leaf: Any, dim: Any, count: int) -> Sequence[Any]:
    """Return one leaf per micro-batch: slices along its batch dimension, or the leaf itself if it is shared.

    Slices share memory but not the version counter, so a model may write into one slice while autograd has saved another.
    """
    if not isinstance(dim, int):
        return (leaf,) * count
    if leaf.layout in _SPARSE:
        raise InputError(
            f"an input is a sparse tensor of shape {tuple(leaf.shape)}",
            why="only dense tensors are cut into micro-batches",
            hint='x.to_dense(); or batch_dims={"name": None}, if all samples share it',
        )
    if leaf.requires_grad:
        return torch.tensor_split(leaf, count, dim)
    return torch.unsafe_split_with_sizes(leaf, sizes(leaf.shape[dim], count), dim)


def apply_batch_dims(
    dims: Dims, leaves: Sequence[Any], slots: Sequence[Slot], batch_dims: BatchDims
) -> tuple[Dims, Dims]:
    """Return the dimensions with the overrides applied, and the dimensions that the rule still decides (else None)."""
    names = [next((name for name in slot if name in batch_dims), None) for slot in slots]
    overridden = [
        dim if name is None else _checked(dim, batch_dims[name], leaf, slot[0])
        for dim, name, leaf, slot in zip(dims, names, leaves, slots, strict=True)
    ]
    return tuple(overridden), tuple([dim if name is None else None for dim, name in zip(dims, names, strict=True)])


def _checked(by_rule: Any, dim: Any, leaf: Any, name: str) -> Any:
    """Return the override of one leaf, a dimension of at least 0; None for a leaf without dimensions."""
    if dim is list:
        return list if isinstance(leaf, torch.Tensor) else None
    if dim is None or by_rule is None:
        return None
    if not -leaf.dim() <= dim < leaf.dim():
        what, where = f"batch_dims: {name} has no dimension {dim}", f"{name} has shape {tuple(leaf.shape)}"
        raise InputError(what, where=where, hint=f'batch_dims={{"{name}": 0}}')
    return dim % leaf.dim()


def common_size(leaves: Sequence[Any], dims: Dims, by_rule: Dims, slots: Callable[[], Sequence[Slot]],
                samples: int | None = None) -> tuple[int | None, Dims]:  # fmt: skip
    """Return the common batch size in samples, or None without a batch, and the dimensions.

    `samples` is the batch size if it is known. A tensor with size 1 along a dimension from the rule is shared. Raise
    InputError if batch sizes disagree or the batch is empty.
    """
    lengths = _lengths(leaves, dims, samples)
    if len(lengths) > 1 and 1 in lengths and samples != 1:
        dims = tuple(
            None if isinstance(dim, int) and dim == rule and leaf.shape[dim] == 1 else dim
            for leaf, dim, rule in zip(leaves, dims, by_rule, strict=True)
        )
        lengths = _lengths(leaves, dims, samples)
    if len(lengths) > 1:
        named = zip(slots(), leaves, dims, strict=True)
        raise _disagreement([(slot[0], leaf, dim) for slot, leaf, dim in named if isinstance(dim, int)], samples)
    if lengths == {0}:
        names = [slot[0] for slot, dim in zip(slots(), dims, strict=True) if dim is not None]
        raise InputError(
            "the batch is empty",
            where=", ".join(f"{name}: 0 samples" for name in names),
            hint="a mini-batch of at least one sample",
        )
    return (int(lengths.pop()) if lengths else None), dims


def _lengths(leaves: Sequence[Any], dims: Dims, samples: int | None) -> set[int]:
    """Return the sizes of all batch dimensions, and `samples`."""
    lengths = {leaf.shape[dim] for leaf, dim in zip(leaves, dims, strict=True) if isinstance(dim, int)}
    return lengths | (set() if samples is None else {samples})


def _disagreement(batched: Sequence[tuple[str, torch.Tensor, int]], samples: int | None) -> InputError:
    """Return the error for (name, leaf, batch dimension) of different sizes, with options that would resolve it."""
    sizes = [leaf.shape[dim] for _, leaf, dim in batched]
    expected = max(sizes, key=sizes.count) if samples is None else samples
    others = [(name, leaf, dim) for name, leaf, dim in batched if leaf.shape[dim] != expected]
    listing = ", ".join(f"{name}: {leaf.shape[dim]}" for name, leaf, dim in batched)
    listing += "" if samples is None else f", inputs: {samples}"
    shared = batch_dims_text((name, None) for name, _, _ in others)
    hint = f"the same number of samples in each; {shared} for what all samples share"
    if alternative := _alternative_dims(batched, others, expected):
        hint += f"; {batch_dims_text(alternative)} for another batch dimension"
    elif samples is None and all(leaf.shape[dim] != 1 for _, leaf, dim in others):
        name, leaf, dim = others[0]
        hint += f"; {_split_text(name, leaf, dim, expected)} if the rows of {name} belong to samples"
    rows = [name for name, leaf, _ in others if is_offsets_beside(leaf, [one for _, one, _ in batched])]
    hint = f'split={{"{rows[0]}": "offsets"}}, which keeps packed sequences whole' if rows else hint
    owners = "inputs" if samples is None else "target and the inputs"
    why = f"dimension {others[0][2]} of {others[0][0]}, of shape {tuple(others[0][1].shape)}, is taken as its batch"
    return InputError(f"the batch sizes of the {owners} disagree", where=listing, why=why, hint=hint)


def _alternative_dims(
    batched: Sequence[tuple[str, torch.Tensor, int]], others: Sequence[tuple[str, torch.Tensor, int]], expected: int
) -> list[tuple[str, int]]:
    """Return (name, dimension) with which the sizes agree: of the leaves that disagree, or of all; empty if none do."""
    moved = [(name, list(leaf.shape).index(expected)) for name, leaf, _ in others if expected in leaf.shape]
    if len(moved) == len(others):
        return moved
    second = {leaf.shape[1] if leaf.dim() > 1 else None for _, leaf, _ in batched}
    return [(name, 1) for name, _, _ in batched] if len(second) == 1 and None not in second else []


def _split_text(name: str, leaf: torch.Tensor, dim: int, samples: int) -> str:
    """Return the option `split` that divides equally many rows per sample, or that names a function if they are not equally many."""
    count, rest = divmod(leaf.shape[dim], samples)
    place = f", {dim}" if dim else ""
    function = f"lambda rows, samples: rows.split([{count} * n for n in samples]{place})" if not rest else "function"
    return f'split={{"{name}": {function}}}'


def batch_dims_text(items: Iterable[tuple[str, Any]]) -> str:
    """Return the option `batch_dims` as a user writes it."""
    written = ", ".join(f'"{name}": {dim.__name__ if isinstance(dim, type) else shown(dim)}' for name, dim in items)
    return f"batch_dims={{{written}}}"


def slots_named(paths: Iterable[tuple[Any, ...]], heads: Callable[[tuple[Any, ...]], tuple[Slot, int]]) -> list[Slot]:
    """Return the names of leaves from their pytree paths.

    `heads` maps a path to the names of its first entries and the number of these entries.
    """
    slots = []
    for path in paths:
        head, used = heads(path)
        rest = [_key(entry) for entry in path[used:]]
        containers = ["_".join([head[0], *rest[:depth]]) for depth in range(len(rest), 0, -1)]
        slots.append((*containers, *head))
    return slots


def _key(entry: Any) -> str:
    """Return a pytree path entry as a part of a name."""
    for attribute in ("idx", "key", "name"):
        if hasattr(entry, attribute):
            return re.sub(r"\W", "_", str(getattr(entry, attribute)))
    return "item"
