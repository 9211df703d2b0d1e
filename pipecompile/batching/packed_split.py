"""A mini-batch of packed sequences as micro-batches: whole sequences, with offsets of their own.

    tokens   a a a a b b c c c     ──►    a a a a b b     c c c        split={"offsets": "offsets"}
    offsets  0 4 6 9                      0 4 6           0 3

"offsets" and "lengths" cut an argument and the tensors that it packs by sequences. A function `f(value, samples)` returns the
argument of each micro-batch, where `samples` are theirs (tokens, if sequences are packed).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch

from pipecompile.batching.batch_dims import BatchDims, Slot, apply_batch_dims, default_dims
from pipecompile.batching.call_inputs import FlatInputs, argument_names, count_leaves, flatten, leaf_slots, target_slots
from pipecompile.batching.containers import flatten_containers
from pipecompile.batching.microbatch_list import MicrobatchList
from pipecompile.batching.microbatches import scatter_tree, split_sizes
from pipecompile.batching.offset_rows import document_groups, offsets_of
from pipecompile.errors import InputError
from pipecompile.text.shown_value import type_text
from pipecompile.text.units import counted
from pipecompile.torch_private import pytree

__all__ = ["Splits", "split_call"]

Splits = Mapping[str, str | Callable[..., Any]]
"""By argument: "offsets", "lengths", or a function of (value, samples of each micro-batch)."""

Piece = Callable[[int], Any]
"""The value of a leaf in micro-batch m."""


def split_call(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Any,
    splits: Splits,
    batch_dims: BatchDims,
    count: int,
) -> MicrobatchList | None:
    """Return at most `count` micro-batches of a call; None if it has none of the arguments. Raise InputError."""
    named = dict(zip(argument_names(forward, args, kwargs), (*args, *kwargs.values()), strict=True))
    rules = {name: rule for name, rule in splits.items() if named.get(name) is not None}
    if not rules:
        return None
    call = _Call(forward, args, kwargs, batch_dims)
    rows = {name: offsets_of(name, named[name], rule) for name, rule in rules.items() if isinstance(rule, str)}
    functions = {name: rule for name, rule in rules.items() if callable(rule)}
    if rows:
        return _of_sequences(call, target, rows, {name: splits[name] for name in rows}, functions, count)
    return _of_rows(call, target, functions, count)


@dataclass(frozen=True, slots=True)
class _Call:
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch_dims: BatchDims

    def without(self, names: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with a _Gap in the place of some."""
        order = argument_names(self.forward, self.args, {})
        args = tuple(_Gap(name) if name in names else value for name, value in zip(order, self.args, strict=True))
        return args, {name: _Gap(name) if name in names else value for name, value in self.kwargs.items()}


@dataclass(frozen=True, slots=True)
class _Gap:
    """The place of an argument that a function splits."""

    name: str


def _of_rows(call: _Call, target: Any, functions: Mapping[str, Callable[..., Any]], count: int) -> MicrobatchList:
    """Return micro-batches of rows, as without functions, with the arguments that functions split."""
    args, kwargs = call.without([*functions])
    whole = flatten(call.forward, args, kwargs, call.batch_dims)
    sizes = split_sizes(whole, count)
    bounds = [*pairwise(accumulate(sizes, initial=0))]
    pieces = [_slices(leaf, dim, bounds) for leaf, dim in zip(whole.leaves, whole.dims, strict=True)]
    targets = [None] * len(sizes)
    if target is not None:
        targets = list(scatter_tree(target, len(sizes), whole.samples, call.batch_dims))
    return _listed(whole, whole.dims, pieces, sizes, _parts(call, functions, sizes), targets)


def _of_sequences(
    call: _Call,
    target: Any,
    rows: Mapping[str, Sequence[int]],
    rules: Mapping[str, Any],
    functions: Mapping[str, Callable[..., Any]],
    count: int,
) -> MicrobatchList:
    """Return micro-batches of whole sequences."""
    packing = _Packing(rows, rules, document_groups(next(iter(rows.values())), count), call.batch_dims)
    args, kwargs = call.without([*functions])
    leaves, spec = flatten_containers((args, kwargs))
    slots = leaf_slots(call.forward, args, kwargs)
    found = packing.pieces(leaves, slots)
    dims = tuple(dim for dim, _ in found)
    whole = FlatInputs(call.forward, args, kwargs, tuple(leaves), spec, dims, packing.total, batch_dims=call.batch_dims)
    targets: list[Any] = [None] * len(packing.groups)
    if target is not None:
        target_leaves, target_spec = flatten_containers(target)
        pieces = [piece for _, piece in packing.pieces(target_leaves, target_slots(target))]
        targets = [pytree.tree_unflatten([piece(m) for piece in pieces], target_spec) for m in range(len(targets))]
    parts = _parts(call, functions, packing.sizes)
    return _listed(whole, dims, [piece for _, piece in found], packing.sizes, parts, targets)


class _Packing:
    """The cut of packed sequences: `rows` are the offsets by argument, `groups` the sequences of each micro-batch."""

    def __init__(
        self,
        rows: Mapping[str, Sequence[int]],
        rules: Mapping[str, Any],
        groups: Sequence[tuple[int, int]],
        batch_dims: BatchDims,
    ) -> None:
        self.rows, self.rules, self.groups, self.batch_dims = rows, rules, groups, batch_dims
        first = next(iter(rows.values()))
        self.total, self.documents = first[-1], len(first) - 1
        self.sizes = tuple(first[end] - first[start] for start, end in groups)
        for name, offsets in rows.items():
            if len(offsets) != len(first):
                raise InputError("arguments of split have different numbers of sequences",
                                 where=", ".join(f"{one}: {len(own) - 1}" for one, own in rows.items()))  # fmt: skip
            if offsets[-1] == self.total and list(offsets) != list(first):
                raise InputError(f"{name} and {next(iter(rows))} pack equally many tokens in different ways",
                                 why="a tensor of so many tokens could be of either", hint="one of them, and a function for the other")  # fmt: skip

    def pieces(self, leaves: Sequence[Any], slots: Sequence[Slot]) -> list[tuple[int | None, Piece]]:
        """Return for each leaf its dimension of tokens, None without one, and its value in each micro-batch."""
        dims, by_rule = apply_batch_dims(default_dims(leaves), leaves, slots, self.batch_dims)
        return [self._piece(*one) for one in zip(leaves, slots, dims, by_rule, strict=True)]

    def _piece(self, leaf: Any, slot: Slot, dim: Any, by_rule: Any) -> tuple[int | None, Piece]:
        if (name := next((name for name in slot if name in self.rows), None)) is not None:
            return None, self._own(leaf, self.rows[name], self.rules[name])
        if not isinstance(leaf, torch.Tensor) or not isinstance(dim, int):
            return None, lambda _: leaf
        for offsets in self.rows.values():
            if (place := _dimension(leaf, dim, by_rule, offsets[-1])) is not None:
                bounds = [(offsets[start], offsets[end]) for start, end in self.groups]
                return (place if offsets[-1] == self.total else None), _slices(leaf, place, bounds)
        if leaf.shape[dim] == self.documents:
            return None, _slices(leaf, dim, self.groups)
        if leaf.shape[dim] == 1 and by_rule is not None:
            return None, lambda _: leaf
        raise InputError(
            f"{slot[0]} has neither an entry per token nor one per sequence",
            where=f"{slot[0]} has shape {tuple(leaf.shape)}, for {self.total} tokens of {self.documents} sequences",
            hint=f'batch_dims={{"{slot[0]}": None}} if all micro-batches share it, or split={{"{slot[0]}": function}}',
        )

    def _own(self, row: torch.Tensor, offsets: Sequence[int], rule: str) -> Piece:
        def piece(m: int) -> torch.Tensor:
            start, end = self.groups[m]
            return row[start:end] if rule == "lengths" else row[start : end + 1] - offsets[start]

        return piece


def _dimension(leaf: torch.Tensor, dim: int, by_rule: Any, total: int) -> int | None:
    """Return the dimension of `total` tokens: the given one, or by default the only dimension of this length."""
    if leaf.shape[dim] == total:
        return dim
    places = [place for place, length in enumerate(leaf.shape) if length == total]
    return places[0] if by_rule is not None and len(places) == 1 else None


def _slices(leaf: Any, dim: Any, bounds: Sequence[tuple[int, int]]) -> Piece:
    if not isinstance(dim, int):
        return lambda _: leaf
    return lambda m: leaf.narrow(dim, bounds[m][0], bounds[m][1] - bounds[m][0])


def _parts(call: _Call, functions: Mapping[str, Callable[..., Any]], sizes: tuple[int, ...]) -> dict[str, list[Any]]:
    """Return what the functions return, by argument. Raise InputError for another number of entries."""
    named = dict(zip(argument_names(call.forward, call.args, call.kwargs), (*call.args, *call.kwargs.values()), strict=True))  # fmt: skip
    parts = {name: function(named[name], sizes) for name, function in functions.items()}
    for name, values in parts.items():
        count = len(values) if isinstance(values, (list, tuple)) else None
        if count != len(sizes):
            returned = counted(count, "entry") if count is not None else type_text(values)
            raise InputError(
                f"the function of split for {name} returned {returned} for {counted(len(sizes), 'micro-batch')}",
                hint="a list with one value per micro-batch",
            )
    return {name: list(values) for name, values in parts.items()}


def _listed(
    whole: FlatInputs,
    dims: Sequence[Any],
    pieces: Sequence[Piece],
    sizes: tuple[int, ...],
    parts: Mapping[str, Sequence[Any]],
    targets: Sequence[Any],
) -> MicrobatchList:
    """Return the micro-batches: pieces of leaves, with the values of the functions in the gaps."""
    calls = []
    for m, size in enumerate(sizes):
        leaves = [parts[leaf.name][m] if isinstance(leaf, _Gap) else piece(m) for leaf, piece in zip(whole.leaves, pieces, strict=True)]  # fmt: skip
        part = whole.part(leaves, size)
        if parts:
            counts = [count_leaves(leaf) if isinstance(old, _Gap) else None for leaf, old in zip(leaves, whole.leaves, strict=True)]  # fmt: skip
            flat, spec = flatten_containers((part.args, part.kwargs))
            own = [one for dim, n in zip(dims, counts, strict=True) for one in ([dim] if n is None else [None] * n)]
            part = replace(part, leaves=tuple(flat), spec=spec, dims=tuple(own))
        calls.append(part)
    return MicrobatchList(tuple(calls), tuple(targets), is_split=True)
