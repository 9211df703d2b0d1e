"""What a call leaves on a model: seen, told apart from what its hooks did, and written by nodes."""

from __future__ import annotations

from collections import deque

import torch
from torch import nn

import pipecompile as pc
from pipecompile.tracing.state.leftover_state import (
    StateWatch,
    change_keys,
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
