"""What a piece kept whole gives, as fake tensors for the recording to go on with, and the promise that the graph relies on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch

from pipecompile.torch_private import pytree
from pipecompile.tracing.fakes.batch_symbol import BatchSymbol
from pipecompile.tracing.opaque.opaque_node import Promise, Promised
from pipecompile.tracing.opaque.result_spec import UNKNOWN, Foretold, Leaf
from pipecompile.tracing.opaque.trial_runs import Seen

__all__ = ["imagine"]


def imagine(
    told: Foretold, given: Sequence[Any], samples: int | None, symbol: BatchSymbol, twin: Callable[[torch.Tensor], Any]
) -> tuple[Any, Promise]:
    """The value of a call and the promise. `given` are the fake leaves of its arguments; call it inside the fake mode."""
    promise = Promise(told.form, (), samples or 1, tuple(told.call.work), told.call.saved_bytes)
    leaves, promised = [], []
    for leaf in told.leaves:
        if leaf.seen is None:
            leaves.append(leaf.value)
            promised.append(Promised(value=leaf.value))
            continue
        sizes, written = _sizes(leaf, symbol, promise)
        tensor = _tensor(leaf.seen, sizes, given, twin)
        symbol.unknowns.measure(tensor, written)
        leaves.append(tensor)
        promised.append(Promised(tuple(written), leaf.seen.dtype, leaf.seen.requires_grad))
    promise.leaves = tuple(promised)
    return pytree.tree_unflatten(leaves, told.form), promise


def _sizes(leaf: Leaf, symbol: BatchSymbol, promise: Promise) -> tuple[list[Any], list[Any]]:
    """The sizes of a tensor as the recording computes with them, and as expressions."""
    assert leaf.seen is not None
    sizes: list[Any] = []
    written: list[Any] = []
    for size, example in zip(leaf.shape, leaf.seen.shape, strict=True):
        if size is UNKNOWN:
            number, name = symbol.unknowns.new(example)
            promise.unknown.add(name)
            promise.hints[name] = example
            sizes.append(number)
            written.append(name)
        elif isinstance(size, int):
            sizes.append(size)
            written.append(size)
        else:
            sizes.append(symbol.size * size.numerator // size.denominator)
            written.append(symbol.symbol * sympy.Rational(size.numerator, size.denominator))
    return sizes, written


def _tensor(seen: Seen, sizes: list[Any], given: Sequence[Any], twin: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    base: Any = None
    if seen.source is not None:
        base = given[seen.source] if isinstance(seen.source, int) else twin(seen.source)
    if base is not None and seen.same:
        assert isinstance(base, torch.Tensor)
        return base
    strides = _strides(sizes, seen)
    if base is not None:
        view: torch.Tensor = base.as_strided(sizes, strides, seen.offset)
        return view if view.requires_grad == seen.requires_grad else view.detach()
    made = torch.empty_strided(sizes, strides, dtype=seen.dtype)
    return made.requires_grad_().clone() if seen.requires_grad else made


def _strides(sizes: Sequence[Any], seen: Seen) -> list[Any]:
    """The strides of the example, computed from these sizes wherever they are products of sizes."""
    strides: list[Any] = list(seen.stride)
    step, real = 1, 1
    for dim in sorted(range(len(sizes)), key=lambda d: (seen.stride[d], -d)):
        if seen.stride[dim] != real:
            step, real = seen.stride[dim], seen.stride[dim]
        strides[dim] = step
        step, real = step * sizes[dim], real * seen.shape[dim]
    return strides
