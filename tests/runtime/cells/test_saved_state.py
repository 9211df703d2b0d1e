"""Copies of the model's state in an autograd graph."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from pipecompile.runtime.cells.saved_state import flags_restored, state_copied
from pipecompile.torch_private.autograd_engine import saved_tensor_hooks

pytestmark = pytest.mark.smoke


def test_state_that_changes_later_is_saved_as_it_was():
    x, state = torch.ones(2, requires_grad=True), torch.full((4,), 3.0)
    with state_copied([state]):
        y = (x * state[:2]).sum()
    state.data.fill_(7)
    state.add_(1)
    y.backward()
    assert x.grad.tolist() == [3, 3]


def test_a_write_to_any_other_saved_tensor_is_an_error_as_usual():
    x, other = torch.ones(2, requires_grad=True), torch.ones(2)
    with state_copied([torch.ones(1)]):
        y = (x * other).sum()
    other.add_(1)
    with pytest.raises(
        RuntimeError, match=r"modified by an inplace operation: \[torch.FloatTensor \[2\]\] is at version 1"
    ):
        y.backward()


def test_hooks_of_the_user_see_what_is_saved():
    x, state, seen = torch.ones(2, requires_grad=True), torch.ones(2), []
    hooks = saved_tensors_hooks(lambda one: seen.append(one) or len(seen) - 1, lambda place: seen[place])
    with hooks, state_copied([state]):
        y = (x * state).sum()
    state.add_(1)
    y.backward()
    assert len(seen) == 1
    assert seen[0] is not state
    assert x.grad.tolist() == [1, 1]


def test_a_copy_has_what_the_forward_leaves_without_a_new_version():
    """As the kernel of batch norm does; its backward in eager would find the same."""
    x, state = torch.ones(2, requires_grad=True), torch.ones(2)
    with state_copied([state]):
        y = (x * state).sum()
        state.data.fill_(5)
    state.data.fill_(7)
    y.backward()
    assert x.grad.tolist() == [5, 5]


def test_state_that_the_forward_itself_spoils_is_an_error_as_usual():
    x, state = torch.ones(2, requires_grad=True), torch.ones(2)
    with state_copied([state]):
        y = (x * state).sum()
        state.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_without_state_there_are_no_hooks():
    with state_copied([]):
        assert saved_tensor_hooks() is None


def test_flags_hold_in_the_block_and_are_those_from_before_it_at_its_end():
    one, two = torch.ones(1, requires_grad=True), torch.ones(1)
    found = []

    def fails():
        with flags_restored([one, two], [False, True]):
            found.extend([one.requires_grad, two.requires_grad])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert found == [False, True]
    assert [one.requires_grad, two.requires_grad] == [True, False]


def test_memory_that_state_gets_inside_is_copied_as_well():
    x, state = torch.ones(2, requires_grad=True), nn.Parameter(torch.ones(2))
    with state_copied([state]):
        state.data = torch.full((2,), 5.0)
        y = (x * state).sum()
    state.data.fill_(7)
    y.backward()
    assert x.grad.tolist() == [5, 5]
