"""State that a forward keeps where few look: on layers, on tensors, in the order of keys."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.errors import TraceError
from pipecompile.tracing import trace


class Noting(nn.Module):
    """A forward whose `note` leaves something somewhere and returns a factor."""

    def __init__(self, note) -> None:
        super().__init__()
        self.first, self.last, self.note = nn.Linear(4, 4), nn.Linear(4, 4), note
        self.kept = OrderedDict(a=1, b=2, c=3)
        self.first.weight.scale = 2.0

    def forward(self, x):
        return self.last(self.first(x) * self.note(self))


def on_a_layer(model):
    model.last.seen = getattr(model.last, "seen", 0) + 1
    return model.last.seen


def on_a_parameter(model):
    model.last.weight.seen = getattr(model.last.weight, "seen", 0) + 1
    return model.last.weight.seen


def by_order(model):
    model.kept.move_to_end(next(iter(model.kept)))
    return next(iter(model.kept.values()))


def by_removal(model):
    if len(model.kept) > 1:
        del model.kept[next(iter(model.kept))]
    return next(iter(model.kept.values()))


@pytest.mark.parametrize(
    ("note", "name"),
    [(on_a_layer, "last.seen"), (on_a_parameter, "last.weight.seen"), (by_order, "kept"), (by_removal, "kept")],
)
def test_state_on_layers_and_tensors_and_the_order_of_keys_are_no_constants(note, name):
    """Each was a constant of the recording, without a word."""
    with pytest.raises(TraceError, match=f"PC114(?s:.*)changes {name}"):
        trace(Noting(note), torch.ones(2, 4))


def test_an_attribute_of_a_parameter_that_changes_is_noticed():
    torch.manual_seed(0)
    model, x = Noting(lambda model: model.first.weight.scale), torch.randn(4, 4)
    pipe = pc.compile(model, 2, example_args=(x,), n_microbatches=2, cost="analytic", devices=["cpu"] * 2).eval()
    for scale in (2.0, 3.0, 4.0, 5.0):
        model.first.weight.scale = scale
        with torch.no_grad():
            assert torch.equal(pipe(x), torch.cat([model(part) for part in x.chunk(2)]))


def test_what_is_set_on_an_input_is_not_in_its_micro_batches():
    x = torch.ones(2, 4)
    x.scale = 2.0

    class Scaled(nn.Module):
        def forward(self, x):
            return x * getattr(x, "scale", 1.0)

    with pytest.warns(pc.RecordingWarning, match="input x has scale set on it"):
        trace(Scaled(), x)


def test_what_is_set_on_the_input_of_a_later_call_is_not_in_its_micro_batches():
    class Scaled(nn.Sequential):
        def forward(self, x):
            return super().forward(x) * getattr(x, "scale", 1.0)

    x = torch.ones(4, 4)
    pipe = pc.compile(Scaled(nn.Linear(4, 4), nn.Linear(4, 4)), 2, example_args=(x,), n_microbatches=2, cost="analytic")
    pipe(x)
    x.scale = 2.0
    with pytest.warns(pc.RecordingWarning, match="input x has scale set on it"):
        pipe(x)
