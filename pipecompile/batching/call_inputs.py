"""The inputs of a model as flat leaves, each with its batch dimension (see batch_dims.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import islice
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from pipecompile.batching.batch_dims import (
    BatchDims,
    Dims,
    Slot,
    common_size,
    default_dims,
    overruled,
    parameters_of,
    scatter,
    slots_named,
)
from pipecompile.batching.containers import opened, taken_apart
from pipecompile.batching.sample_lists import entries, listed_names
from pipecompile.errors import InputError
from pipecompile.torch_private import pytree

__all__ = ["FlatInputs", "count_leaves", "flatten", "flatten_target"]


@dataclass(frozen=True, slots=True)
class FlatInputs:
    """Leaves of (args, kwargs) in pytree order, and the structure to put them back. Cheap: made anew in every step.

    `dims` has the batch dimension of each leaf, None for what is the same for every micro-batch, `list` for what is in an
    argument with an entry per sample; `lists` names these. `samples` is the size that all share, None when there is no batch.
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

    @property
    def names(self) -> tuple[str, ...]:
        """Leaves are named after the parameter of `forward` that they arrive in: x, mask, pair_0 ..."""
        return tuple(slot[0] for slot in _slots(self.forward, self.args, self.kwargs))

    @property
    def arguments(self) -> tuple[str, ...]:
        """The parameters of `forward` that were given, in the order of the call."""
        return _arguments(self.forward, self.args, self.kwargs)

    @property
    def values(self) -> tuple[Any, ...]:
        """What was given for each of the arguments."""
        return (*self.args, *self.kwargs.values())

    def detached(self) -> FlatInputs:
        """The same call on leaves of their own, which autograd does not connect with these."""
        return replace(self, leaves=tuple(map(_detached, self.leaves)))

    def part(self, leaves: Sequence[Any], samples: int) -> FlatInputs:
        """The same call with the leaves of one micro-batch."""
        args, kwargs = pytree.tree_unflatten(list(leaves), self.spec)
        return replace(self, args=args, kwargs=kwargs, leaves=tuple(leaves), samples=self.samples and samples)

    def doubtful(self) -> tuple[str, ...]:
        """The leaves beside the first that are taken for batches, and are as long as the batch in two dimensions."""
        named = [*zip(self.names, self.leaves, self.dims, strict=True)]
        batched = [(name, leaf) for name, leaf, dim in named if isinstance(dim, int)]
        return tuple(name for name, leaf in batched[1:] if tuple(leaf.shape).count(self.samples) > 1)

    def resized(self, samples: int) -> FlatInputs:
        """A call like this with so many samples, of no particular values; what is in lists is repeated."""
        pairs = zip(self.leaves, self.dims, strict=True)
        leaves = [_resized(leaf, dim, samples) if isinstance(dim, int) else leaf for leaf, dim in pairs]
        if not self.lists:
            return self.part(leaves, samples)
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self._with(lambda values: [values[i % len(values)] for i in range(samples)], args, kwargs)

    def shares(self, count: int) -> Iterator[FlatInputs]:
        """The calls of `count` micro-batches, where `count` divides the samples and there are lists with an entry for each."""
        size = (self.samples or 0) // count
        parts = [scatter(leaf, dim, count) for leaf, dim in zip(self.leaves, self.dims, strict=True)]
        for m in range(count):
            args, kwargs = pytree.tree_unflatten([part[m] for part in parts], self.spec)
            yield self._with(itemgetter(slice(m * size, (m + 1) * size)), args, kwargs)

    def _with(
        self, taken: Callable[[Sequence[Any]], Sequence[Any]], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> FlatInputs:
        """The call with these arguments, and of the lists what is `taken`."""
        given = zip(self.arguments, (*args, *kwargs.values()), strict=True)
        values = [taken(value) if name in self.lists and value is not None else value for name, value in given]
        named = dict(zip(kwargs, values[len(args) :], strict=True))
        return flatten(self.forward, tuple(values[: len(args)]), named, self.batch_dims)


def _detached(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


def count_leaves(value: Any) -> int:
    """How many leaves a value has."""
    return pytree.tree_structure(opened(value)).num_leaves


def _resized(leaf: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    shape = [size if index == dim else length for index, length in enumerate(leaf.shape)]
    return leaf.new_zeros(shape).requires_grad_(leaf.requires_grad)


def flatten(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], batch_dims: BatchDims | None = None
) -> FlatInputs:
    """Flatten a call of `forward`. Raises InputError when the batch sizes of its tensors disagree or are zero."""
    leaves, spec = _apart(args, kwargs)
    slots = partial(_slots, forward, args, kwargs)
    lists = listed_names(batch_dims) if batch_dims else frozenset[str]()
    listed = None
    if lists:
        listed = entries(dict(zip(_arguments(forward, args, kwargs), (*args, *kwargs.values()), strict=True)), lists)
    samples, dims = _agreed(leaves, slots, batch_dims or {}, listed)
    return FlatInputs(
        forward, args, kwargs, tuple(leaves), spec, dims, samples, lists if listed else frozenset(), batch_dims or {}
    )


def _apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves and structure of a call; most calls give tensors only, and then the structure is known."""
    given = (*args, *kwargs.values())
    for value in given:
        if type(value) is not torch.Tensor:
            return taken_apart((args, kwargs))
    order, spec = _of_tensors(len(args), tuple(kwargs))
    return [given[place] for place in order], spec


@lru_cache(maxsize=256)
def _of_tensors(count: int, names: tuple[str, ...]) -> tuple[list[int], pytree.TreeSpec]:
    """The order of the leaves, and the structure, of a call with so many tensors by place and these by name."""
    places = iter(range(count + len(names)))
    return pytree.tree_flatten((tuple(islice(places, count)), dict(zip(names, places, strict=True))))


def flatten_target(target: Any, batch_dims: BatchDims, samples: int | None) -> tuple[list[Any], pytree.TreeSpec, Dims]:
    """The leaves of a target, its structure and batch dimensions. Raises InputError unless it has `samples` samples."""
    leaves, spec = taken_apart(target)
    _, dims = _agreed(leaves, partial(_target_slots, target), batch_dims, samples)
    return leaves, spec, dims


def _agreed(
    leaves: Sequence[Any], slots: Callable[[], list[Slot]], batch_dims: BatchDims, samples: int | None
) -> tuple[int | None, Dims]:
    dims = by_rule = default_dims(leaves)
    if batch_dims:
        dims, by_rule = overruled(dims, leaves, slots(), batch_dims)
    return common_size(leaves, dims, by_rule, slots, samples)


def _slots(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Slot]:
    """What each leaf may be called: by itself, by its argument, and by the `*args` that it is one of."""
    positional = _positional(forward, len(args))

    def head(path: tuple[Any, ...]) -> tuple[Slot, int]:
        side, first = path[0].idx, path[1]
        return (positional[first.idx] if side == 0 else (str(first.key),)), 2

    return slots_named((path for path, _ in pytree.tree_flatten_with_path(opened((args, kwargs)))[0]), head)


def _target_slots(target: Any) -> list[Slot]:
    return slots_named(
        (path for path, _ in pytree.tree_flatten_with_path(opened(target))[0]), lambda _: (("target",), 0)
    )


def _arguments(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    return (*(slot[0] for slot in _positional(forward, len(args))), *kwargs)


def _positional(forward: Callable[..., Any], count: int) -> list[Slot]:
    names: list[Slot] = []
    for parameter in parameters_of(forward).values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [(f"{parameter.name}_{i}", parameter.name) for i in range(count - len(names))]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append((parameter.name,))
    return (names + [(f"arg_{i}",) for i in range(len(names), count)])[:count]


_SHAPELESS = (UninitializedParameter, UninitializedBuffer)


def validate_model(model: object) -> nn.Module:
    """Raise InputError for anything that is not an `nn.Module`, and for one whose lazy layers have no shapes yet."""
    if not isinstance(model, nn.Module):
        raise InputError(
            f"the model is a {type(model).__name__}, not an nn.Module", hint="wrap the function in a module"
        )
    if lazy := [
        name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if isinstance(tensor, _SHAPELESS)
    ]:
        raise InputError("the model has parameters without a shape", where=", ".join(lazy),
                         why="its lazy layers learn their shapes in the first call",
                         hint="call model(*example_args) once before compile")  # fmt: skip
    return model
