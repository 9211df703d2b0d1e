"""Calls are flattened into named leaves with batch dimensions, and micro-batches are calls again."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.batching.call_inputs import (
    FlatInputs,
    check_target,
    count_leaves,
    first_difference,
    flatten,
    flatten_target,
)
from pipecompile.batching.microbatches import scatter_tree
from pipecompile.batching.offset_rows import offset_names
from pipecompile.errors import InputError


def forward(x: Any, pair: Any = None, *rest: Any, mask: Any = None) -> None:
    """Stand in for the forward of a model: only the signature counts."""


def call(*args: Any, batch_dims: dict[str, Any] | None = None, **kwargs: Any) -> FlatInputs:
    return flatten(forward, args, kwargs, batch_dims)


def test_leaves_are_named_after_their_parameters() -> None:
    x = torch.zeros(4, 2)
    inputs = call(x, (x, {"a": x}), x, mask=x)
    assert inputs.names == ("x", "pair_0", "pair_1_a", "rest_0", "mask")
    assert inputs.arguments == ("x", "pair", "rest_0", "mask")
    assert inputs.samples == 4
    assert inputs.dims == (0, 0, 0, 0, 0)


def test_a_call_with_tensors_alone_has_the_order_of_every_other_call() -> None:
    x, y = torch.zeros(2), torch.ones(2)
    fast, slow = call(x, mask=y), call(x, None, mask=y)
    assert [leaf.sum() for leaf in fast.leaves] == [0, 2]
    assert fast.names == ("x", "mask")
    assert slow.names[0] == "x"
    assert slow.names[-1] == "mask"


def test_a_scalar_and_a_tensor_of_size_one_are_shared() -> None:
    inputs = call(torch.zeros(4, 2), torch.zeros(()), mask=torch.zeros(1, 2))
    assert inputs.dims == (0, None, None)
    assert call(torch.zeros(1, 2), mask=torch.zeros(1, 2)).dims == (0, 0)


def test_batch_dims_override_the_rule_and_disagreement_is_an_error() -> None:
    x, mask = torch.zeros(4, 2), torch.zeros(3, 4)
    assert call(x, mask=mask, batch_dims={"mask": 1}).dims == (0, 1)
    assert call(x, mask=mask, batch_dims={"mask": None}).dims == (0, None)
    with pytest.raises(InputError, match="batch sizes of the inputs disagree"):
        call(x, mask=mask)


def test_a_resized_call_has_zeros_of_the_new_size_and_shared_leaves_as_they_are() -> None:
    mask = torch.ones(1, 2)
    inputs = call(torch.ones(4, 2, requires_grad=True), mask=mask).resized(6)
    assert inputs.samples == 6
    assert inputs.leaves[0].shape == (6, 2)
    assert inputs.leaves[0].requires_grad
    assert not inputs.leaves[0].any()
    assert inputs.leaves[1] is mask


def test_lists_are_divided_by_entries_and_repeat_when_resized() -> None:
    entries = [torch.full((2,), float(i)) for i in range(4)]
    inputs = call(entries, batch_dims={"x": list})
    assert (inputs.samples, inputs.lists) == (4, frozenset({"x"}))
    first, second = inputs.microbatch_calls(2)
    assert [leaf[0].item() for leaf in first.leaves] == [0, 1]
    assert [leaf[0].item() for leaf in second.leaves] == [2, 3]
    assert [leaf[0].item() for leaf in inputs.resized(6).leaves] == [0, 1, 2, 3, 0, 1]


def test_detached_leaves_require_gradients_as_the_originals_do() -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(2)
    leaves = call(x, y).detached().leaves
    assert [leaf.requires_grad for leaf in leaves] == [True, False]
    assert leaves[0].is_leaf
    assert leaves[0] is not x


def test_a_leaf_as_long_as_the_batch_in_two_dimensions_is_ambiguous() -> None:
    assert call(torch.zeros(4, 4), mask=torch.zeros(4, 4)).ambiguous_leaves() == ("mask",)
    assert call(torch.zeros(4, 4), mask=torch.zeros(4, 3)).ambiguous_leaves() == ()


def test_the_first_difference_of_micro_batches_is_named() -> None:
    one, two = call([torch.zeros(2)]), call([torch.zeros(3)])
    text = first_difference(one, two, 1)
    assert text == "x_0 is torch.float32 (2,) in micro-batch 0, torch.float32 (3,) in micro-batch 1"
    longer = call([torch.zeros(2), torch.zeros(2)])
    assert first_difference(one, longer, 2) == "micro-batch 0 has 1 value, micro-batch 2 has 2 values"


def test_values_that_are_written_alike_in_short_are_told_apart() -> None:
    """Numbers that differ in the middle, and objects of one class, were "1 value" and "1 value"."""
    for one, two in ((10**200, 10**200 + 10**100), ("a" * 300, "a" * 150 + "b" + "a" * 149), (object(), object())):
        assert first_difference(call(one), call(two), 1).startswith("x is ")


def test_targets_have_leaves_names_and_dimensions() -> None:
    leaves, _, dims = flatten_target({"a": torch.zeros(4), "b": torch.zeros(2, 4)}, {"target_b": 1}, 4)
    assert len(leaves) == count_leaves({"a": 1, "b": 2}) == 2
    assert dims == (0, 1)
    with pytest.raises(InputError, match="target: 3, inputs: 4"):
        flatten_target(torch.zeros(3), {}, 4)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, tokens: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(tokens) + offsets[:, None])


@pytest.mark.parametrize(
    ("offsets", "found"),
    [([0, 2, 3, 4], True), ([0, 2, 2, 4], True), ([1, 2, 3, 4], False), ([0, 3, 2, 4], False), ([0, 1, 2, 9], False),
     ([0.0, 2.0, 3.0, 4.0], False), ([0, 0, 0, 0], False)],
)  # fmt: skip
def test_offsets_are_recognised(offsets: list[float], found: bool) -> None:
    inputs = flatten(Packed().forward, (torch.zeros(4, 3), torch.tensor(offsets)), {})
    assert offset_names(inputs.names, inputs.leaves, inputs.dims, inputs.samples) == (
        [("offsets", True)] if found else []
    )
    shared = flatten(Packed().forward, (torch.zeros(4, 3), torch.tensor(offsets)), {}, {"offsets": None})
    assert offset_names(shared.names, shared.leaves, shared.dims, shared.samples) == (
        [("offsets", False)] if found else []
    )  # all of them, beside a part of the tokens
    fixed = flatten(Packed().forward, (torch.zeros(4, 3), torch.tensor(offsets)), {}, {"offsets": None, "tokens": None})
    assert offset_names(fixed.names, fixed.leaves, fixed.dims, fixed.samples) == []


def test_offsets_that_are_cut_come_with_one_warning() -> None:
    def piped(offsets: list[int], count: int) -> pc.Pipeline:
        pipe = pc.compile(Packed(), 2, n_microbatches=count, loss_fn=torch.Tensor.mean, cost="analytic")
        for _ in range(2):
            pipe.step(torch.zeros(4, 3), torch.tensor(offsets))
        return pipe

    with pytest.warns(pc.RecordingWarning, match="offsets looks like offsets of packed sequences") as caught:
        piped([0, 1, 3, 4], 2)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", pc.RecordingWarning)
        piped([0, 1, 3, 4], 1)
        piped([3, 1, 0, 2], 2)


def test_a_generator_is_refused_wherever_it_is() -> None:
    """As a target, the first reader took its items, and the loss was computed with none."""
    x = torch.zeros(4, 2)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pipe = pc.compile(
        model, 2, loss_fn=lambda out, target: (out - sum(target)).sum(), n_microbatches=2, cost="analytic"
    )
    for refused in (
        lambda: call(row for row in [x]),
        lambda: check_target({"rows": iter([x])}),
        lambda: pipe.step(x, target=(row for row in [x])),
        lambda: pipe.step(microbatches=[(x, (row for row in [x]))]),
        lambda: scatter_tree(map(abs, [x]), 1, None, {}),
    ):
        with pytest.raises(InputError, match="it gives its items once"):
            refused()


@pytest.mark.parametrize("kind", [set, frozenset])
def test_a_set_of_tensors_is_divided_as_a_list_is(kind: Any) -> None:
    """A target of one sample was compared with the sets of all samples: it has the shape of a broadcast."""
    x, y = torch.randn(4, 2), torch.randn(4, 2)
    losses = []
    for target in ([y], kind([y])):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        pipe = pc.compile(model, 2, loss_fn=lambda out, target: (out - sum(target)).pow(2).mean(), n_microbatches=4,
                          cost="analytic")  # fmt: skip
        losses.append(pipe.step(x, target=target))
    assert torch.equal(*losses)
