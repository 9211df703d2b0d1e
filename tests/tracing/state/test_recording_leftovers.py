"""The leftovers of a recording are the changes of the model's own code, without those of leaf modules and twins."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from bodies import rows
from torch import nn
from torch.func import functional_call

from pipecompile import TraceError
from pipecompile.tracing import trace
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


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.drop = nn.Dropout(0.5)


class Functional(Net):
    def forward(self, x):
        other = functional_call(self.first, {"weight": self.second[0].weight * 2}, (x,))
        weights = {name: value + 1 for name, value in self.second.named_parameters()}
        return self.first(x) + other + functional_call(self.second, weights, (x,)) + self.second(x)


class Attributes(Net):
    def forward(self, x):
        self.second[1].eval()
        self.drop.p = 0.0
        return self.drop(self.second(self.first(x)))


class Hooks(Net):
    def forward(self, x):
        seen = []
        doubled = self.first.register_forward_hook(lambda module, args, output: output * 2)
        kept = self.second[0].register_forward_hook(lambda module, args, output: seen.append(output))
        made = self.second(self.first(x))
        doubled.remove()
        kept.remove()
        return made + seen[0] + self.first(x)


class Hyper(Net):
    def forward(self, x):
        held = self.first.bias
        del self.first.bias
        self.first.bias = x.mean(0)
        made = self.first(x)
        del self.first.bias
        self.first.bias = held
        return made + self.second(x)


@pytest.mark.parametrize("model", [Functional, Attributes, Hooks, Hyper])
def test_a_module_that_forward_changes_is_recorded_as_it_is_then(agrees, model):
    agrees(model(), rows(4), sizes=(2, 3, 5))


def test_unchanged_modules_stay_whole():
    graph = trace(Hooks(), torch.randn(3, 4))
    assert [node.target for node in graph.graph.nodes if node.op == "call_module"] == ["second.1", "first"]


def test_backward_hooks_on_a_module_that_forward_changes_are_refused():
    model = Attributes()
    model.drop.register_full_backward_hook(lambda module, given, made: None)
    with pytest.raises(TraceError, match="drop is changed by forward"):
        trace(model, torch.randn(3, 4))


class Replaces(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.kind = nn.Linear(4, 4), nn.Linear(4, 4), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "weight":
            self.b.weight = self.a.weight
        if self.kind == "no bias":
            self.b.bias = None
        if self.kind == "child":
            self.b = self.a
        if self.kind == "for a while":
            before, self.b.weight = self.b.weight, self.a.weight
            x = self.b(x)
            self.b.weight = before
        return self.b(self.a(x))


@pytest.mark.parametrize(
    ("kind", "name"), [("weight", "b.weight"), ("no bias", "b.bias"), ("child", "b"), ("for a while", ""), ("none", "")]
)
def test_parameters_and_children_that_forward_replaces_are_a_warning(kind: str, name: str) -> None:
    """The model kept its own, without a word, and its state dict was not that of eager."""
    model, x = Replaces(kind), torch.randn(2, 4)
    eager = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph = trace(model, x)
    texts = [str(one.message) for one in caught if "forward replaces" in str(one.message)]
    assert len(texts) == bool(name)
    assert all(f"Replaces.forward replaces {name}: a pipeline computes with" in text for text in texts)
    assert torch.equal(graph(x), eager(x))
