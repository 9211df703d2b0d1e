"""What a call leaves on a model: seen, told apart from what its hooks did, and written by nodes."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.tracing.state.leftover_state import (
    StateWatch,
    change_keys,
    effect_function,
    effects_muted,
    without_keys,
)


class Notes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.latest, self.recent = 0, [], None, deque([1, 2], maxlen=2)
        self.register_buffer("mean", torch.zeros(2))


def test_changes_are_what_is_otherwise_now() -> None:
    model = Notes()
    watch = StateWatch(model)
    assert watch.changes() == []
    value = torch.ones(2)
    model.calls += 1
    model.seen.append(value)
    model.latest = value
    model.mean = torch.ones(2)  # buffers are no state of this kind
    model.recent.append(3)  # drops the 1
    found = {change.name: change.value for change in watch.changes()}
    assert found == {"calls": 1, "latest": value, "seen": [value], "recent": [3]}


def test_items_of_a_list_are_replaced_or_added_and_anything_else_is_no_node() -> None:
    model = Notes()
    a, b, c = torch.ones(1), torch.zeros(1), torch.ones(2)
    model.seen = [a, b]

    def change(*now: torch.Tensor) -> list[tuple[object, bool]]:
        watch = StateWatch(model)
        model.seen[:] = now
        found = [(found.key, effect_function(found, None, model) is not None) for found in watch.changes()]
        model.seen[:] = [a, b]
        return found

    assert change(a, c) == [(1, True)]
    assert change(a, b, c) == [(None, True)]
    assert change(c, b, c) == [(0, True), (None, True)]
    assert change(b, c) == [(None, False)]
    assert change(a) == [(None, False)]


def test_what_a_layer_did_itself_is_left_out() -> None:
    model = Notes()
    watch = StateWatch(model)
    mine, its = torch.ones(1), torch.zeros(1)
    model.seen.append(its)
    model.calls = 5
    known = change_keys(watch.changes())
    model.seen.append(mine)
    (left,) = without_keys(watch.changes(), known)
    assert len(left.value) == 1
    assert left.value[0] is mine


class Codebook(nn.Module):
    """Turns a part of itself to evaluation in every call, as vector quantizers do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.codes = nn.Sequential(Notes(), nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.codes.eval()
        return self.codes[1](self.first(x))


def test_modes_of_layers_that_a_call_turns_are_left_turned() -> None:
    model, expected, x = Codebook(), Codebook(), torch.ones(4, 4)
    expected(x)
    pipe = pc.compile(model, 1, n_microbatches=2, loss_fn=lambda y: y.square().mean(), cost="analytic")
    for _ in range(2):
        pipe.step(x)
        modes = {name: module.training for name, module in model.named_modules()}
        assert modes == {name: module.training for name, module in expected.named_modules()}


@pytest.mark.parametrize(("later", "written"), [(2, True), (4, False)])
def test_a_count_is_advanced_when_every_call_advances_it_alike(later: int, written: bool) -> None:
    model = Notes()
    watch = StateWatch(model)
    model.calls = 1
    (change,) = watch.changes()
    advance = effect_function(change, later, model)
    assert (advance is not None) == written
    if written:
        advance()
        assert model.calls == 2
        with effects_muted():
            advance()
        assert model.calls == 2


def test_a_number_that_each_call_sets_is_kept() -> None:
    model = Notes()
    watch = StateWatch(model)
    model.calls = 5
    (change,) = watch.changes()
    keep = effect_function(change, 5, model)
    model.calls = 0
    keep(5)
    assert (keep.__name__, model.calls) == ("keep", 5)


@pytest.mark.parametrize(
    ("later", "is_made"), [(None, True), ("x", True), ("xx", False), (("x",), False), (torch.ones(2), False)]
)
def test_a_plain_value_is_kept_only_if_each_call_leaves_the_same(later: object, is_made: bool) -> None:
    model = Notes()
    watch = StateWatch(model)
    model.latest = "x"
    (change,) = watch.changes()
    assert (effect_function(change, later, model) is not None) == is_made
