"""Which dimension of each tensor is the batch: the rule, and what the user says instead.

A tensor's batch is dimension 0. A tensor without dimensions is shared by all samples, and so is one of size 1 there
when others are longer: eager would broadcast it. `batch_dims` overrules this by the name of the parameter that a
tensor arrives in, with all its leaves, or of one leaf or what holds it (`pair_0`, `batch_mask`): a dimension, or None
for shared. The most exact name counts. `list` says that the argument is a list with an entry per sample (lists.py).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

import torch

from pipecompile.errors import InputError

__all__ = [
    "BatchDims",
    "Dims",
    "Slot",
    "check_batch_dims",
    "common_size",
    "default_dims",
    "overruled",
    "pasted",
    "scatter",
    "sizes",
    "slots_named",
]

BatchDims = Mapping[str, int | None | type[list[Any]]]
Dims = tuple[int | None | type[list[Any]], ...]
Slot = tuple[str, ...]
"""The names that a leaf goes by, the most exact first."""


def check_batch_dims(batch_dims: BatchDims, forward: Callable[..., Any], extra: Sequence[str] = ()) -> None:
    """Raise InputError for a name that `forward` has no parameter for, and for what is not a dimension."""
    if not isinstance(batch_dims, Mapping):
        raise InputError(f"batch_dims={batch_dims!r} is not a mapping", hint='batch_dims={"mask": None, "src": 1}')
    parameters = parameters_of(forward)
    known = [*parameters, *extra]
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name, dim in batch_dims.items():
        if dim is not None and dim is not list and (isinstance(dim, bool) or not isinstance(dim, int)):
            hint = "a dimension, None for a tensor that all samples share, or list for a list with an entry per sample"
            raise InputError(f"batch_dims[{name!r}] is {dim!r}", hint=hint)
        if not open_ended and not any(name == one or name.startswith(f"{one}_") for one in known):
            nearest = (get_close_matches(name, known, n=1) or known or [name])[0]
            raise InputError(f"batch_dims names {name!r}, which forward does not take",
                             where="its parameters are " + ", ".join(parameters), hint=pasted([(nearest, dim)]))  # fmt: skip
        if dim is list and not open_ended and name not in known:
            raise InputError(f"batch_dims[{name!r}] is list, but {name} is no argument of its own",
                             where="the arguments are " + ", ".join(parameters), hint=pasted([(known[0], dim)]))  # fmt: skip


def parameters_of(forward: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a forward; of one in C++, which does not tell, any."""
    try:
        return inspect.signature(forward).parameters
    except ValueError:
        kinds = {"args": inspect.Parameter.VAR_POSITIONAL, "kwargs": inspect.Parameter.VAR_KEYWORD}
        return {name: inspect.Parameter(name, kind) for name, kind in kinds.items()}


def default_dims(leaves: Sequence[Any]) -> Dims:
    """Dimension 0 of every tensor that has one."""
    return tuple([0 if isinstance(leaf, torch.Tensor) and leaf.dim() else None for leaf in leaves])


@lru_cache(maxsize=256)
def sizes(samples: int, count: int) -> tuple[int, ...]:
    """How many samples each of `count` micro-batches has."""
    small, larger = divmod(samples, count)
    return tuple([small + (i < larger) for i in range(count)])


def scatter(leaf: Any, dim: Any, count: int) -> Sequence[Any]:
    """The micro-batches of one flat leaf: slices along its batch dimension, or the thing itself for each.

    Slices share memory and not the count of its versions: when the model writes into one, autograd has no quarrel with the others.
    """
    if not isinstance(dim, int):
        return (leaf,) * count
    if leaf.requires_grad:
        return torch.tensor_split(leaf, count, dim)
    return torch.unsafe_split_with_sizes(leaf, sizes(leaf.shape[dim], count), dim)


def overruled(dims: Dims, leaves: Sequence[Any], slots: Sequence[Slot], batch_dims: BatchDims) -> tuple[Dims, Dims]:
    """The dimensions with the user's word in the place of the rule; and only those that are the rule's."""
    given = [next((name for name in slot if name in batch_dims), None) for slot in slots]
    said = [
        dim if name is None else _checked(dim, batch_dims[name], leaf, slot[0])
        for dim, name, leaf, slot in zip(dims, given, leaves, slots, strict=True)
    ]
    return tuple(said), tuple([dim if name is None else None for dim, name in zip(dims, given, strict=True)])


def _checked(by_rule: Any, dim: Any, leaf: Any, name: str) -> Any:
    if dim is list:
        return list if isinstance(leaf, torch.Tensor) else None
    if dim is None or by_rule is None:
        return None
    if not -leaf.dim() <= dim < leaf.dim():
        raise InputError(f"batch_dims: {name} has no dimension {dim}", where=f"{name} has shape {tuple(leaf.shape)}")
    return dim % leaf.dim()


def common_size(leaves: Sequence[Any], dims: Dims, by_rule: Dims, slots: Callable[[], Sequence[Slot]],
                samples: int | None = None) -> tuple[int | None, Dims]:  # fmt: skip
    """The batch size that all agree on (`samples`, when that is known), or None, and the dimensions: what has size 1
    by the rule alone is shared.

    Raises InputError when they disagree, or when the batch is empty.
    """
    found = _lengths(leaves, dims, samples)
    if len(found) > 1 and 1 in found and samples != 1:
        dims = tuple(
            None if isinstance(dim, int) and dim == rule and leaf.shape[dim] == 1 else dim
            for leaf, dim, rule in zip(leaves, dims, by_rule, strict=True)
        )
        found = _lengths(leaves, dims, samples)
    if len(found) > 1:
        named = zip(slots(), leaves, dims, strict=True)
        raise _disagreement([(slot[0], leaf, dim) for slot, leaf, dim in named if isinstance(dim, int)], samples)
    if found == {0}:
        names = [slot[0] for slot, dim in zip(slots(), dims, strict=True) if dim is not None]
        raise InputError("the batch is empty", where=", ".join(f"{name}: 0 samples" for name in names))
    return (int(found.pop()) if found else None), dims


def _lengths(leaves: Sequence[Any], dims: Dims, samples: int | None) -> set[int]:
    found = {leaf.shape[dim] for leaf, dim in zip(leaves, dims, strict=True) if isinstance(dim, int)}
    return found | (set() if samples is None else {samples})


def _disagreement(batched: Sequence[tuple[str, torch.Tensor, int]], samples: int | None) -> InputError:
    sizes = [leaf.shape[dim] for _, leaf, dim in batched]
    right = samples or max(sizes, key=sizes.count)
    others = [(name, leaf, dim) for name, leaf, dim in batched if leaf.shape[dim] != right]
    listing = ", ".join(f"{name}: {leaf.shape[dim]}" for name, leaf, dim in batched)
    listing += "" if samples is None else f", inputs: {samples}"
    hint = f"the same number of samples in each; {pasted((name, None) for name, _, _ in others)} for what all samples share"
    if elsewhere := _elsewhere(batched, others, right):
        hint += f"; {pasted(elsewhere)} for another batch dimension"
    whose = "inputs" if samples is None else "target and the inputs"
    why = f"dimension {others[0][2]} of {others[0][0]}, of shape {tuple(others[0][1].shape)}, is taken as its batch"
    return InputError(f"the batch sizes of the {whose} disagree", where=listing, why=why, hint=hint)


def _elsewhere(
    batched: Sequence[tuple[str, torch.Tensor, int]], others: Sequence[tuple[str, torch.Tensor, int]], right: int
) -> list[tuple[str, int]]:
    """Another dimension in which the sizes do agree: of those that disagree, or of all."""
    moved = [(name, list(leaf.shape).index(right)) for name, leaf, _ in others if right in leaf.shape]
    if len(moved) == len(others):
        return moved
    second = {leaf.shape[1] if leaf.dim() > 1 else None for _, leaf, _ in batched}
    return [(name, 1) for name, _, _ in batched] if len(second) == 1 and None not in second else []


def pasted(items: Iterable[tuple[str, Any]]) -> str:
    """The option as a user writes it."""
    written = ", ".join(f'"{name}": {dim.__name__ if isinstance(dim, type) else dim}' for name, dim in items)
    return f"batch_dims={{{written}}}"


def slots_named(paths: Iterable[tuple[Any, ...]], heads: Callable[[tuple[Any, ...]], tuple[Slot, int]]) -> list[Slot]:
    """The slots of leaves from their pytree paths; `heads` names the start of a path, and says how much of it that is."""
    found = []
    for path in paths:
        head, used = heads(path)
        rest = [_key(entry) for entry in path[used:]]
        held = ["_".join([head[0], *rest[:depth]]) for depth in range(len(rest), 0, -1)]
        found.append((*held, *head))
    return found


def _key(entry: Any) -> str:
    for attribute in ("idx", "key", "name"):
        if hasattr(entry, attribute):
            return re.sub(r"\W", "_", str(getattr(entry, attribute)))
    return "item"
