"""Fake results have the sizes, strides, views and identities of the first trial run, in symbols of the batch size."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pipecompile.torch_private.modes import FakeTensorMode
from pipecompile.tracing.fakes.batch_symbol import BatchSymbol
from pipecompile.tracing.opaque.fake_results import fake_result
from pipecompile.tracing.opaque.opaque_module import ExpectedResult
from pipecompile.tracing.opaque.result_spec import UNKNOWN, LeafSpec, ResultSpec, Size
from pipecompile.tracing.opaque.trial_calls import TrialCall, TrialTensor

STRUCTURE = pytree.tree_structure([0])


def leaf(example: torch.Tensor, shape: tuple[Size, ...], **options: Any) -> LeafSpec:
    seen = TrialTensor(
        tuple(example.shape), example.stride(), int(example.storage_offset()), example.dtype, example.requires_grad, **options
    )  # fmt: skip
    return LeafSpec(shape, seen)


def faked(spec: LeafSpec, *, argument: torch.Tensor | None = None) -> tuple[Any, ExpectedResult, BatchSymbol, Any]:
    """The fake leaf of a spec, of a call whose only argument is a batch of 4 samples."""
    symbol = BatchSymbol(4)
    with FakeTensorMode(shape_env=symbol.env) as mode:
        source = torch.empty(symbol.size, 6) if argument is None else mode.from_tensor(argument)
        result = ResultSpec(STRUCTURE, (spec,), TrialCall(STRUCTURE, [], saved_bytes=64))
        (value,), expected = fake_result(result, [source], 4, symbol, lambda tensor: mode.from_tensor(tensor))
    return value, expected, symbol, source


def test_sizes_are_multiples_of_the_batch_size_numbers_or_new_symbols() -> None:
    value, expected, symbol, _ = faked(leaf(torch.ones(10, 6, 3), (Fraction(5, 2), 6, UNKNOWN)))
    (name,) = expected.data_sizes
    assert expected.leaves[0].shape == (symbol.symbol * 5 / 2, 6, name)
    assert expected.hints == {name: 3}
    assert (expected.samples, expected.saved_bytes) == (4, 64)
    assert [int(size) for size in value.shape] == [10, 6, 3]


def test_strides_follow_the_symbolic_sizes() -> None:
    value, _, symbol, _ = faked(leaf(torch.ones(6, 4).T, (Fraction(1), 6)))
    assert value.stride()[0] == 1
    assert value.stride()[1].node.expr == symbol.symbol


def test_an_argument_that_comes_back_is_itself_and_a_view_shares_its_memory() -> None:
    example = torch.ones(4, 6)
    same, _, _, source = faked(leaf(example, (Fraction(1), 6), source=0, is_source=True))
    assert same is source
    view, _, _, source = faked(leaf(example[:, 2:], (Fraction(1), 4), source=0))
    assert view is not source
    assert view.untyped_storage()._cdata == source.untyped_storage()._cdata
    assert view.storage_offset() == 2


def test_a_result_with_a_gradient_is_no_leaf_and_plain_values_are_passed_on() -> None:
    value, _, _, _ = faked(leaf(torch.ones(4, 2, requires_grad=True), (Fraction(1), 2)))
    assert value.requires_grad
    assert not value.is_leaf
    value, expected, _, _ = faked(LeafSpec((), None, "word"))
    assert value == expected.leaves[0].value == "word"
