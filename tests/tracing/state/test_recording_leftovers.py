"""The leftovers of a recording are the changes of the model's own code, without those of leaf modules and twins."""

from __future__ import annotations

import torch
from torch import nn

from pipecompile.tracing.state.leftover_state import StateWatch
from pipecompile.tracing.state.recording_leftovers import RecordingLeftovers


class Notes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen, self.latest = nn.Linear(2, 2), [], torch.zeros(2)


def test_what_the_hooks_of_a_leaf_change_is_left_out() -> None:
    model = Notes()
    hook = model.layer.register_forward_hook(lambda module, args, output: model.seen.append(output))
    leftovers = RecordingLeftovers(model, lambda a, b: False)
    with leftovers.leaf_call(model.layer):
        model.layer(torch.ones(1, 2))
    assert leftovers.changes() == []
    mine = torch.ones(1)
    model.seen.append(mine)
    (change,) = leftovers.changes()
    assert (change.name, change.key) == ("seen", None)
    assert change.value[0] is mine
    hook.remove()


def test_a_fake_twin_in_the_place_of_a_tensor_is_no_change() -> None:
    model, twin = Notes(), torch.ones(2)
    original = model.latest
    leftovers = RecordingLeftovers(model, lambda a, b: a is twin and b is original)
    model.latest = twin
    assert leftovers.changes() == []
    since = StateWatch(model)
    model.latest = torch.ones(2)
    assert [change.name for change in leftovers.changes(since)] == ["latest"]


def test_a_length_that_was_read_is_of_one_container() -> None:
    model = Notes()
    leftovers = RecordingLeftovers(model, lambda a, b: False)
    assert id(model.seen) in leftovers.sized_containers
    model.seen.append(1)
    model.latest = None
    changes = leftovers.changes()
    assert not leftovers.is_length_read(changes)
    leftovers.note_length_read(model.seen)
    assert leftovers.is_length_read(changes)
    assert not leftovers.is_length_read([change for change in changes if change.name == "latest"])
