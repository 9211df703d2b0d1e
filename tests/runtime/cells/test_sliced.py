"""Attention over the keys and values of earlier slices, and the cells of slices."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

from pipecompile.runtime.cells.sliced import KeysValues, SlicedAttention, SlicedPositions, SlicedRows, SliceState


def attended(state: SliceState, layer: SlicedAttention, parts: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    """Return the attention of each slice; gradients of keys and values are left on the leaves."""
    earlier: list[KeysValues] = []
    outputs = []
    for query, key, value in parts:
        with state.entered(earlier):
            outputs.append(layer(query, key, value))
            earlier = [*earlier, KeysValues.of(state.own)]
    return outputs


@pytest.mark.parametrize("with_hooks", [False, True])
def test_attention_of_slices_is_that_of_the_whole(with_hooks: bool) -> None:
    whole = [torch.randn(2, 3, 8, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    state = SliceState(2)
    layer = SlicedAttention(state)
    parts = list(zip(*(one.detach().requires_grad_().chunk(4, 2) for one in whole), strict=True))
    if with_hooks:
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            outputs = attended(state, layer, parts)
    else:
        outputs = attended(state, layer, parts)
    expected = F.scaled_dot_product_attention(*whole, is_causal=True)
    torch.testing.assert_close(torch.cat(outputs, 2), expected)


def test_gradients_reach_the_leaves_of_earlier_slices() -> None:
    state, tensors = SliceState(2), [torch.randn(1, 1, 2, 4, requires_grad=True) for _ in range(6)]
    layer = SlicedAttention(state)
    with state.entered(()):
        layer(*tensors[:3])
        first = KeysValues.of(state.own)
    with state.entered([first]):
        layer(*tensors[3:]).square().sum().backward()
    assert [leaf.grad is not None for leaf in first.leaves] == [True, True]
    assert all(one.grad is None for one in tensors[:3])
    assert all(one.grad is not None for one in tensors[3:])


def test_copies_of_keys_and_values_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    state, copies, cat = SliceState(64), [], torch.cat

    def watched(*arguments: Any) -> torch.Tensor:
        joined = cat(*arguments)
        copies.append(weakref.ref(joined))
        return joined

    monkeypatch.setattr(torch, "cat", watched)
    layer = SlicedAttention(state)
    first = KeysValues(tuple(torch.randn(1, 2, 64, 8, requires_grad=True) for _ in range(2)))
    with state.entered([first]):
        output = layer(*(torch.randn(1, 2, 64, 8, requires_grad=True) for _ in range(3)))
    assert [copy() for copy in copies] == [None, None]
    output.sum().backward()
    assert all(leaf.grad is not None for leaf in first.leaves)


def test_positions_and_rows_are_those_of_the_slice() -> None:
    state = SliceState(2)
    earlier = [KeysValues(())] * 3
    with state.entered(earlier):
        assert SlicedPositions(state)(torch.arange(2)).tolist() == [6, 7]
        assert SlicedRows(state, 1)(torch.arange(20).view(2, 10)).tolist() == [[6, 7], [16, 17]]
    assert state.offset == 0


def test_attentions_share_a_mask() -> None:
    state = SliceState(2)
    with state.entered([KeysValues(())]):
        query = torch.randn(1, 2, 4)
        mask = state.mask(query)
        assert mask.isinf().tolist() == [[False, False, False, True], [False, False, False, False]]
        assert state.mask(query) is mask
        assert state.mask(query.double()).dtype is torch.float64
