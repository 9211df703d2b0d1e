from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from pipecompile import TraceError
from pipecompile.tracing import trace
from pipecompile.tracing.state.snapshot import places_of


class Store:
    def __init__(self) -> None:
        self.last, self.seen = None, []


class Hoarder(nn.Module):
    """Keeps whatever it can wherever it can, draws random numbers, hooks itself, and may fail at the end."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4), persistent=False)
        self.calls, self.cache, self.seen, self.store, self.fails = 0, {}, [], Store(), fails
        self.constant = torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h = self.norm(x) * random.random() + torch.rand_like(x) + float(np.random.rand())
        self.cache["h"] = self.store.last = self.latest = h
        self.seen.append(h)
        self.store.seen.append(h)
        self.mean += h.detach().mean(0)
        self.constant += 1
        self.mean = self.mean * 2
        self.head.register_forward_hook(lambda module, args, output: output * 2)
        self.head.training = False
        self.extra = nn.Linear(4, 4)
        self.register_buffer("late", torch.ones(4))
        if self.fails:
            raise ValueError("late")
        return self.head(h)


def state(model: nn.Module) -> list[object]:
    numbers = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]
    tensors = [*model.parameters(), *model.buffers(), model.constant]
    return [
        *numbers, *(t.tolist() for t in tensors), *map(id, tensors), *(t._version for t in tensors), list(model.state_dict()),
        *(sorted(module.__dict__) for module in model.modules()), [m.training for m in model.modules()],
        [len(m._forward_hooks) for m in model.modules()], dict(model.cache), list(model.seen), dict(vars(model.store)),
        list(model.store.seen), model.calls,
    ]  # fmt: skip


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_the_model_is_left_exactly_as_it_was_found(fails, training):
    model = Hoarder(fails=fails).train(training)
    x = torch.randn(3, 4)
    before = state(model)
    with pytest.raises(TraceError, match="ValueError: late" if fails else "state that an earlier call left"):
        trace(model, x)
    assert state(model) == before


def test_shared_and_cyclic_containers():
    model = nn.Sequential(nn.Linear(4, 4))
    model.ring = [model, {"self": model}]
    model.ring.append(model.ring)
    trace(model, torch.randn(2, 4))
    assert model.ring[2] is model.ring


def test_a_generic_alias_is_no_container():
    """Configurations of transformers hold annotations, whose `__dict__` is that of the class: every such model was refused."""
    model = nn.Sequential(nn.Linear(4, 4))
    model.fields = {"sizes": list[int], "names": dict[str, int]}
    assert trace(model, torch.randn(2, 4)).graph.nodes


def test_the_model_still_runs_and_copies_afterwards():
    model = Hoarder()
    with pytest.raises(TraceError):
        trace(model, torch.randn(3, 4))
    twin = copy.deepcopy(model)
    x = torch.randn(3, 4)
    for module in (model, twin):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        module(x)
    assert torch.equal(model.latest, twin.latest)


def test_keys_that_cannot_be_written_have_the_name_of_their_type() -> None:
    class Mute:
        def __repr__(self) -> str:
            raise RuntimeError

    model = nn.Linear(1, 1)
    model.table = {Mute(): [1], 2: [2]}
    names = {place.name for place in places_of(model, deep=True)}
    assert {"table.Mute", "table.2"} <= names


def test_a_recorded_graph_does_not_lead_to_what_the_recording_read() -> None:
    far = [0]

    class Model(nn.Module):
        def forward(self, x):
            return x * (1 + len(far))

    graph = trace(Model(), torch.ones(2, 2))
    assert not any(place.container is far for place in places_of(graph, deep=True))
