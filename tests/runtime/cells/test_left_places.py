"""The places in which stages leave tensors, and the refusal of a backward through what `pipe(x)` has left."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.errors import InputError
from pipecompile.runtime.cells.left_places import LeftPlaces, exchanged
from pipecompile.runtime.cells.side_effects import SideEffects

pytestmark = [pytest.mark.smoke, pytest.mark.filterwarnings("ignore::pipecompile.RecordingWarning")]


class Holder(nn.Module):
    """Has tensors in several kinds of containers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.one = nn.Linear(2, 2), torch.ones(1)
        self.listed: Any = [torch.ones(2), (torch.ones(3), "text")]
        self.queue, self.nested = deque([torch.ones(4)]), {"a": {"b": torch.ones(5)}}


def places_in(holder: Holder) -> LeftPlaces:
    return LeftPlaces([SideEffects(holders=(holder,))])


def test_tensors_in_all_kinds_of_containers_are_found_and_parameters_are_not():
    lengths = sorted(one.numel() for one in places_in(Holder()).tensors())
    assert lengths == [1, 2, 3, 4, 5]


def test_tensors_are_exchanged_for_the_length_of_a_block():
    holder = Holder()
    places, then = places_in(holder), {id(one): one for one in places_in(holder).tensors()}
    instead = {key: (one, one.detach() + 1) for key, one in then.items()}
    with exchanged([places], instead):
        assert all(one.unique().tolist() == [2] for one in places.tensors())
        holder.queue.clear()
    assert {id(one) for one in places.tensors()} == {key for key, one in then.items() if one.numel() != 4}


def test_each_place_gets_its_own_tensor_again_if_one_came_in_the_place_of_several():
    """As where a queue has the tensors of two micro-batches, and the loss is that of a third."""
    holder, shown = Holder(), torch.zeros(1)
    first, second = torch.ones(2), torch.ones(2)
    holder.queue = deque([first, second])
    holder.nested["c"] = (second, 0)
    with exchanged([places_in(holder)], {id(first): (first, shown), id(second): (second, shown)}):
        assert [*holder.queue, holder.nested["c"][0]] == [shown] * 3
        holder.listed.append(shown)
    assert list(map(id, (*holder.queue, holder.nested["c"][0]))) == list(map(id, (first, second, second)))
    assert holder.listed[-1] is first


class Leaves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.hidden: Any = None

    def forward(self, x):
        self.hidden = self.layers[1](self.layers[0](x))
        return self.layers[2](self.hidden)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_backward_through_what_a_call_has_left_is_refused(checkpoint):
    """Its gradient was lost with recomputation, without a word; without, it was an error of autograd."""
    model, x = Leaves(), torch.randn(4, 4)
    pipe = pc.compile(model, 2, n_microbatches=2, cost="analytic", split_before=["layers.2"], checkpoint=checkpoint)
    outer = model.prior = torch.ones(1, requires_grad=True) * 2
    output = pipe(x)
    torch.testing.assert_close(model.hidden.detach(), model.layers[1](model.layers[0](x)).detach())
    with pytest.raises(InputError, match="a call of the pipeline left"):
        (output.sum() + model.hidden.sum()).backward()
    (pipe(x).sum() + model.prior.sum()).backward()
    assert model.prior is outer
