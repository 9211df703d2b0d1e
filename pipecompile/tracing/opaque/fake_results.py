"""Fake results: a result spec as fake tensors, with which the recording goes on behind an opaque call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch

from pipecompile.torch_private import pytree
from pipecompile.tracing.fakes.batch_symbol import BatchSymbol
from pipecompile.tracing.opaque.opaque_module import ExpectedLeaf, ExpectedResult
from pipecompile.tracing.opaque.result_spec import UNKNOWN, LeafSpec, ResultSpec
from pipecompile.tracing.opaque.trial_calls import TrialTensor

__all__ = ["fake_result"]


def fake_result(
    spec: ResultSpec,
    arguments: Sequence[Any],
    samples: int | None,
    symbol: BatchSymbol,
    twin: Callable[[torch.Tensor], Any],
) -> tuple[Any, ExpectedResult]:
    """Return the result of a call while recording, and the result that every run must have. Call this inside the fake mode.

    `arguments` are the fake leaves of the call's arguments, `samples` the batch size of the first trial run, and `twin`
    returns the fake tensor of a tensor of the model.
    """
    symbol.data_sizes.n_calls += 1
    expected = ExpectedResult(
        spec.structure, (), samples or 1, tuple(spec.call.work), spec.call.saved_bytes, left=spec.call.left
    )
    leaves, expected_leaves = [], []
    for leaf in spec.leaves:
        if leaf.example is None:
            leaves.append(leaf.value)
            expected_leaves.append(ExpectedLeaf(value=leaf.value))
            continue
        sizes, expressions = _sizes(leaf, symbol, expected)
        tensor = _fake_tensor(leaf.example, sizes, arguments, twin)
        symbol.data_sizes.bind(tensor, expressions)
        leaves.append(tensor)
        expected_leaves.append(ExpectedLeaf(tuple(expressions), leaf.example.dtype, leaf.example.requires_grad))
    expected.leaves = tuple(expected_leaves)
    return pytree.tree_unflatten(leaves, spec.structure), expected


def _sizes(leaf: LeafSpec, symbol: BatchSymbol, expected: ExpectedResult) -> tuple[list[Any], list[Any]]:
    """Return the sizes of a tensor as the recording computes with them, and as expressions.

    Every UNKNOWN size gets a new symbol, which is noted in `expected`.
    """
    assert leaf.example is not None
    sizes: list[Any] = []
    expressions: list[Any] = []
    for size, example in zip(leaf.shape, leaf.example.shape, strict=True):
        if size is UNKNOWN:
            alike = [known for known, size in expected.hints.items() if size == example]
            number, name = symbol.data_sizes.new(example, alike)
            expected.data_sizes.add(name)
            expected.hints[name] = example
            sizes.append(number)
            expressions.append(name)
        elif isinstance(size, int):
            sizes.append(size)
            expressions.append(size)
        else:
            sizes.append(symbol.size * size.numerator // size.denominator)
            expressions.append(symbol.symbol * sympy.Rational(size.numerator, size.denominator))
    return sizes, expressions


def _fake_tensor(
    example: TrialTensor, sizes: list[Any], arguments: Sequence[Any], twin: Callable[[torch.Tensor], Any]
) -> torch.Tensor:
    """Return a fake tensor like `example` of these sizes: the same tensor or a view if it was, else a new one."""
    base: Any = None
    if example.source is not None:
        base = arguments[example.source] if isinstance(example.source, int) else twin(example.source)
    if base is not None and example.is_source:
        assert isinstance(base, torch.Tensor)
        return base
    strides = _strides(sizes, example)
    if base is not None:
        view: torch.Tensor = base.as_strided(sizes, strides, example.offset)
        return view if view.requires_grad == example.requires_grad else view.detach()
    fake = torch.empty_strided(sizes, strides, dtype=example.dtype)
    return fake.requires_grad_().clone() if example.requires_grad else fake


def _strides(sizes: Sequence[Any], example: TrialTensor) -> list[Any]:
    """Return the strides of the example, computed from `sizes` wherever they are products of sizes."""
    strides: list[Any] = list(example.stride)
    step, example_step = 1, 1
    for dim in sorted(range(len(sizes)), key=lambda d: (example.stride[d], -d)):
        if example.stride[dim] != example_step:
            step, example_step = example.stride[dim], example.stride[dim]
        strides[dim] = step
        step, example_step = step * sizes[dim], example_step * example.shape[dim]
    return strides
