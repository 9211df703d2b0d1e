"""The inputs of a call as flat leaves, each with its batch dimension (batch_dims.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import islice
from operator import itemgetter
from typing import Any

import torch

from pipecompile.batching.batch_dims import (
    BatchDims,
    Dims,
    Slot,
    apply_batch_dims,
    common_size,
    default_dims,
    dims_of_shapes,
    parameters_of,
    scatter,
    slots_named,
)
from pipecompile.batching.block_masks import mask_dims
from pipecompile.batching.containers import check_rereadable, flatten_containers, with_shells
from pipecompile.batching.sample_lists import list_length, listed_names, with_list_hint
from pipecompile.errors import InputError
from pipecompile.text.shown_value import shown
from pipecompile.torch_private import pytree

__all__ = [
    "FlatInputs",
    "argument_names",
    "check_target",
    "count_leaves",
    "first_difference",
    "flatten",
    "flatten_target",
    "leaf_slots",
    "target_slots",
]


IsShared = Callable[[torch.Tensor, Sequence[Any]], bool]
"""Whether a leaf among these leaves has no batch dimension."""


@dataclass(frozen=True, slots=True)
class FlatInputs:
    """A call of `forward`: the leaves of (args, kwargs) in pytree order, and the structure to rebuild them.

    `dims` has the batch dimension of each leaf, None for a leaf that all micro-batches share, `list` for a leaf of an argument
    with one entry per sample. `lists` names these arguments. `samples` is the common batch size, None without a batch.
    `indivisible` is the user's line for which the call cannot be cut.
    Instances are created in every step, so creation is cheap.
    """

    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    dims: Dims = ()
    samples: int | None = None
    lists: frozenset[str] = frozenset()
    batch_dims: BatchDims = field(default_factory=dict)
    indivisible: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the leaves, after the parameters of `forward` that they arrive in: x, mask, pair_0 ..."""
        return tuple(slot[0] for slot in leaf_slots(self.forward, self.args, self.kwargs))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The leaves that are tensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    @property
    def arguments(self) -> tuple[str, ...]:
        """The parameters of `forward` with a value, in the order of the call."""
        return argument_names(self.forward, self.args, self.kwargs)

    @property
    def values(self) -> tuple[Any, ...]:
        """The value of each of the `arguments`."""
        return (*self.args, *self.kwargs.values())

    def detached(self) -> FlatInputs:
        """Return the call with detached leaves, which require gradients if the original leaves do."""
        return replace(self, leaves=tuple(map(_detached, self.leaves)))

    def part(self, leaves: Sequence[Any], samples: int) -> FlatInputs:
        """Return the call with the leaves of one micro-batch of `samples` samples."""
        args, kwargs = pytree.tree_unflatten(list(leaves), self.spec)
        return replace(self, args=args, kwargs=kwargs, leaves=tuple(leaves), samples=self.samples and samples)

    def ambiguous_leaves(self) -> tuple[str, ...]:
        """Return the names of batched leaves, the first excepted, in which several dimensions are as long as the batch."""
        named = [*zip(self.names, self.leaves, self.dims, strict=True)]
        batched = [(name, leaf) for name, leaf, dim in named if isinstance(dim, int)]
        return tuple(name for name, leaf in batched[1:] if tuple(leaf.shape).count(self.samples) > 1)

    def resized(self, samples: int) -> FlatInputs:
        """Return a call with another number of samples: tensors are zeros, the entries of lists repeat."""
        pairs = zip(self.leaves, self.dims, strict=True)
        leaves = [_resized(leaf, dim, samples) if isinstance(dim, int) else leaf for leaf, dim in pairs]
        if not self.lists:
            return self.part(leaves, samples)
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self._with(lambda values: [values[i % len(values)] for i in range(samples)], args, kwargs)

    def microbatch_calls(self, count: int) -> Iterator[FlatInputs]:
        """Yield the calls of `count` micro-batches if there are lists. `count` must divide the number of samples."""
        size = (self.samples or 0) // count
        parts = [scatter(leaf, dim, count) for leaf, dim in zip(self.leaves, self.dims, strict=True)]
        for m in range(count):
            args, kwargs = pytree.tree_unflatten([part[m] for part in parts], self.spec)
            yield self._with(itemgetter(slice(m * size, (m + 1) * size)), args, kwargs)

    def _with(
        self, entries_of: Callable[[Sequence[Any]], Sequence[Any]], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> FlatInputs:
        """Return the call with these arguments; `entries_of` selects the entries of each list."""
        pairs = zip(self.arguments, (*args, *kwargs.values()), strict=True)
        values = [entries_of(value) if name in self.lists and value is not None else value for name, value in pairs]
        named = dict(zip(kwargs, values[len(args) :], strict=True))
        return flatten(self.forward, tuple(values[: len(args)]), named, self.batch_dims)


def _detached(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


def count_leaves(value: Any) -> int:
    """Return the number of leaves of a value."""
    return pytree.tree_structure(with_shells(value)).num_leaves


def _resized(leaf: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    shape = [size if index == dim else length for index, length in enumerate(leaf.shape)]
    return leaf.new_zeros(shape).requires_grad_(leaf.requires_grad)


def flatten(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batch_dims: BatchDims | None = None,
    *,
    is_shared: IsShared | None = None,
) -> FlatInputs:
    """Flatten a call of `forward`. Raise InputError if the batch sizes of its tensors disagree or are zero.

    Where they disagree, leaves for which `is_shared` holds have no batch dimension.
    """
    leaves, spec, is_plain = _flatten_call(args, kwargs)
    if is_plain and not batch_dims and (known := dims_of_shapes(tuple([leaf.shape for leaf in leaves]))):
        return FlatInputs(forward, args, kwargs, tuple(leaves), spec, known[1], known[0])
    slots = partial(leaf_slots, forward, args, kwargs)
    lists = listed_names(batch_dims) if batch_dims else frozenset[str]()
    samples_listed = list_length(_arguments(forward, args, kwargs), lists) if lists else None
    default, line = default_dims(leaves), ""
    if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):  # a mask has numbers among its leaves
        default, line = mask_dims(default, leaves, spec)
    try:
        samples, dims = _samples_and_dims(leaves, slots, batch_dims or {}, samples_listed, is_shared, default)
    except InputError as error:
        raise error if lists else with_list_hint(error, _arguments(forward, args, kwargs)) from None
    return FlatInputs(
        forward,
        args,
        kwargs,
        tuple(leaves),
        spec,
        dims,
        samples,
        lists if samples_listed else frozenset(),
        batch_dims or {},
        line,
    )


def _flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], pytree.TreeSpec, bool]:
    """Return leaves and structure of a call, and whether it has tensors only: the usual case, whose structure is cached."""
    values = (*args, *kwargs.values())
    for value in values:
        if type(value) is not torch.Tensor:
            return *flatten_containers((args, kwargs)), False
    order, spec = _structure_of_tensors(len(args), tuple(kwargs))
    return [values[position] for position in order], spec, True


@lru_cache(maxsize=256)
def _structure_of_tensors(count: int, names: tuple[str, ...]) -> tuple[list[int], pytree.TreeSpec]:
    """Return order and structure of the leaves of a call with `count` positional tensors and these keyword tensors."""
    positions = iter(range(count + len(names)))
    return pytree.tree_flatten((tuple(islice(positions, count)), dict(zip(names, positions, strict=True))))


def flatten_target(target: Any, batch_dims: BatchDims, samples: int | None) -> tuple[list[Any], pytree.TreeSpec, Dims]:
    """Return leaves, structure and batch dimensions of a target. Raise InputError unless it has `samples` samples."""
    leaves, spec = flatten_containers(target)
    _, dims = _samples_and_dims(leaves, partial(target_slots, target), batch_dims, samples)
    return leaves, spec, dims


def check_target(target: Any) -> None:
    """Raise InputError for a target that cannot be read several times."""
    if target is not None and not isinstance(target, torch.Tensor):
        check_rereadable(flatten_containers(target)[0], lambda: [slot[0] for slot in target_slots(target)])


def _samples_and_dims(
    leaves: Sequence[Any],
    slots: Callable[[], list[Slot]],
    batch_dims: BatchDims,
    samples: int | None,
    is_shared: IsShared | None = None,
    default: Dims | None = None,
) -> tuple[int | None, Dims]:
    dims = by_rule = default_dims(leaves) if default is None else default
    check_rereadable(leaves, lambda: [slot[0] for slot in slots()])
    if batch_dims:
        dims, by_rule = apply_batch_dims(dims, leaves, slots(), batch_dims)
    if is_shared is not None and len(_lengths(leaves, dims)) > 1:
        pairs = zip(leaves, dims, by_rule, strict=True)
        dims = tuple([None if rule is not None and is_shared(leaf, leaves) else dim for leaf, dim, rule in pairs])
    return common_size(leaves, dims, by_rule, slots, samples)


def _lengths(leaves: Sequence[Any], dims: Dims) -> set[int]:
    return {leaf.shape[dim] for leaf, dim in zip(leaves, dims, strict=True) if isinstance(dim, int)}


def leaf_slots(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Slot]:
    """Return the names of each leaf: its own, those of its containers, its argument, and the `*args` that it belongs to."""
    positional = _positional(forward, len(args))

    def head(path: tuple[Any, ...]) -> tuple[Slot, int]:
        side, first = path[0].idx, path[1]
        return (positional[first.idx] if side == 0 else (str(first.key),)), 2

    return slots_named((path for path, _ in pytree.tree_flatten_with_path(with_shells((args, kwargs)))[0]), head)


def target_slots(target: Any) -> list[Slot]:
    """Return the names of each leaf of a target."""
    return slots_named(
        (path for path, _ in pytree.tree_flatten_with_path(with_shells(target))[0]), lambda _: (("target",), 0)
    )


def argument_names(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the arguments of a call."""
    return (*(slot[0] for slot in _positional(forward, len(args))), *kwargs)


def _arguments(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return dict(zip(argument_names(forward, args, kwargs), (*args, *kwargs.values()), strict=True))


def _positional(forward: Callable[..., Any], count: int) -> list[Slot]:
    """Return the names of `count` positional arguments: `x`, or `args_0` and `args` for one of `*args`."""
    names: list[Slot] = []
    for parameter in parameters_of(forward).values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [(f"{parameter.name}_{i}", parameter.name) for i in range(count - len(names))]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append((parameter.name,))
    return (names + [(f"arg_{i}",) for i in range(len(names), count)])[:count]


def first_difference(first: FlatInputs, other: FlatInputs, number: int) -> str:
    """Describe the first leaf of micro-batch `number` whose type, shape or value differs from micro-batch 0."""
    for name, one, two in zip(first.names, first.leaves, other.leaves, strict=False):
        if _compared(one) != _compared(two):
            return f"{name} is {_leaf_text(one)} in micro-batch 0, {_leaf_text(two)} in micro-batch {number}"
    counts = [f"{n} value{'s' * (n != 1)}" for n in (len(first.leaves), len(other.leaves))]
    return f"micro-batch 0 has {counts[0]}, micro-batch {number} has {counts[1]}"


def _compared(leaf: Any) -> Any:
    """Return the key by which two leaves are compared: the kind of a tensor, a plain value itself, else the identity of the object."""
    if isinstance(leaf, torch.Tensor):
        return _leaf_text(leaf)
    return (type(leaf), leaf) if isinstance(leaf, (str, bytes, int, float, complex)) else id(leaf)


def _leaf_text(leaf: Any) -> str:
    return f"{leaf.dtype} {tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else shown(leaf)
