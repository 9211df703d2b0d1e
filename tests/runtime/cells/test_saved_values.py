"""Copies of what autograd saved of state that is written before the backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from pipecompile.runtime.cells.saved_values import copy_saved, saved_names


def grad(tensor: torch.Tensor) -> list[float]:
    assert tensor.grad is not None
    return tensor.grad.tolist()


def test_a_copy_is_read_where_the_tensor_is_written_later() -> None:
    x, scale = torch.ones(2, requires_grad=True), torch.full((2,), 3.0)
    y = x * scale[0:1]
    copy_saved([None, get_gradient_edge(y)], [scale])
    scale.mul_(10)
    y.sum().backward()
    assert grad(x) == [3.0, 3.0]


def test_a_write_before_is_refused_as_in_eager() -> None:
    x, scale = torch.ones(2, requires_grad=True), torch.full((2,), 3.0)
    y = x * scale
    scale.mul_(10)
    copy_saved([get_gradient_edge(y)], [scale])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_other_tensors_are_checked_as_before() -> None:
    x, scale, other = torch.ones(2, requires_grad=True), torch.full((2,), 3.0), torch.ones(2)
    y = x * scale * other
    copy_saved([get_gradient_edge(y)], [scale])
    other.mul_(10)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_weights_get_their_gradients() -> None:
    weight, x = nn.Parameter(torch.full((2,), 3.0)), torch.ones(2, requires_grad=True)
    y = x * weight
    copy_saved([get_gradient_edge(y)], [weight])
    with torch.no_grad():
        weight.mul_(10)
    y.sum().backward()
    assert (grad(x), grad(weight)) == ([3.0, 3.0], [1.0, 1.0])


def test_what_a_user_function_saved() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale):
            ctx.save_for_backward(scale)
            return x * scale

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0], None

    x, scale = torch.ones(2, requires_grad=True), torch.full((2,), 3.0)
    y = Product.apply(x, scale)
    copy_saved([get_gradient_edge(y)], [scale])
    scale.mul_(10)
    y.sum().backward()
    assert x.grad.tolist() == [3.0, 3.0]


def test_names_of_what_a_node_saved() -> None:
    node = (torch.ones(2, requires_grad=True) * torch.ones(2)).grad_fn
    assert dict(saved_names(node)) == {"_raw_saved_other": "_saved_other", "_raw_saved_self": "_saved_self"}
