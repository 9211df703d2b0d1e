"""The gradients of tensors that stages left on objects."""

import weakref

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from pipecompile.runtime.cells.left_gradients import LeftGradients, LeftTensor

pytestmark = pytest.mark.smoke


def left(tensor):
    edge = get_gradient_edge(tensor) if tensor.requires_grad else None
    return LeftTensor(weakref.ref(tensor), tensor.detach(), edge)


def test_a_backward_begins_at_what_the_loss_has_read():
    weight = torch.ones(2, requires_grad=True)
    read, unread = weight * 2, weight * 3
    pair = [left(read), left(unread)]
    for one in pair:
        one.shown()
    pair[0].leaf.grad = torch.tensor([1.0, 5.0])
    ((edge, gradient),) = LeftGradients(left=pair).roots()
    torch.autograd.backward([edge], [gradient])
    assert weight.grad.tolist() == [2, 10]


def test_what_the_loss_reads_has_the_values_and_another_graph():
    tensor = torch.ones(2, requires_grad=True) * 2
    one = left(tensor)
    (one.shown() * 7).sum().backward()
    assert one.leaf.grad.tolist() == [7, 7]
    assert one.shown().tolist() == [2, 2]


def test_a_tensor_without_a_gradient_is_shown_as_it_is():
    one = left(torch.ones(2))
    assert one.shown() is one.values
    with torch.no_grad():
        assert left(torch.ones(1, requires_grad=True) * 2).shown().grad_fn is None
