"""The gradients of tensors that stages left on objects."""

import weakref
from types import SimpleNamespace

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


@pytest.mark.parametrize(("there", "streams"), [("cuda:0", ["of part 0"]), ("cuda:1", [])])
def test_a_gradient_of_another_stream_of_the_card_is_kept_until_it_is_read(
    monkeypatch: pytest.MonkeyPatch, there: str, streams: list[str]
):
    """Parts of a card have streams of their own. Before, the last stage could write where this one still read."""
    recorded: list[object] = []
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: "of part 0")
    gradient = SimpleNamespace(device=torch.device(there), record_stream=recorded.append, to=lambda _: "moved")
    values = SimpleNamespace(device=torch.device("cuda:0"))
    one = LeftTensor(lambda: None, values, "edge", SimpleNamespace(grad=gradient))
    assert [*LeftGradients(left=[one]).roots()] == [("edge", "moved")]
    assert recorded == streams


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
