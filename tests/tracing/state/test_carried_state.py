"""State in attributes and containers that a call reads before it replaces it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.errors import TraceError


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.reset()

    def state(self) -> list[torch.Tensor]:
        return [self.h]


class Recurrent(_Net):
    def reset(self) -> None:
        self.h: Any = torch.ones(2, 4)

    def forward(self, x):
        h = torch.tanh(self.first(x) + self.second(self.h))
        self.h = h.detach()
        return self.last(h)


class RecurrentFromNone(_Net):
    def reset(self) -> None:
        self.h, self.calls = None, 0

    def forward(self, x):
        h = torch.tanh(self.first(x))
        if self.h is not None:
            h = h + self.second(self.h)
        self.h = h.detach()
        self.calls += 1
        return self.last(h)

    def state(self) -> list[torch.Tensor]:
        return [self.h, torch.tensor(self.calls)]


class Cell(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(4, 4)

    def reset(self) -> None:
        self.hidden = torch.zeros(2, 4), torch.ones(2, 4)

    def forward(self, x):
        h, c = self.cell(self.first(x), self.hidden)
        self.hidden = h.detach(), c.detach()
        return self.last(self.second(h))

    def state(self) -> list[torch.Tensor]:
        return [*self.hidden]


class Memory(_Net):
    def reset(self) -> None:
        self.mems: list[torch.Tensor] = []

    def forward(self, x):
        h = torch.tanh(self.first(x))
        for mem in self.mems:
            h = h + 0.3 * self.second(mem)
        self.mems = [*self.mems, h.detach()][-2:]
        return self.last(h)

    def state(self) -> list[torch.Tensor]:
        return self.mems


class InDict(_Net):
    def reset(self) -> None:
        self.kept = {"h": torch.zeros(2, 4)}

    def forward(self, x):
        h = torch.tanh(self.first(x) + self.second(self.kept["h"]))
        self.kept["h"] = h.detach()
        return self.last(h)

    def state(self) -> list[torch.Tensor]:
        return [self.kept["h"]]


class Delayed(_Net):
    """The new value of one place is what another held before."""

    def reset(self) -> None:
        self.near, self.far = torch.zeros(2, 4), torch.ones(2, 4)

    def forward(self, x):
        h = torch.tanh(self.first(x) + self.second(self.far))
        self.near, self.far = h.detach(), self.near
        return self.last(h)

    def state(self) -> list[torch.Tensor]:
        return [self.near, self.far]


class Aliased(Delayed):
    def reset(self) -> None:
        self.near = self.far = torch.zeros(2, 4)


class Inside(nn.Module):
    def __init__(self, net: Callable[[], Any]) -> None:
        super().__init__()
        self.net = net()
        self.reset, self.state = self.net.reset, self.net.state

    def forward(self, x):
        return self.net(x)


_loss = nn.functional.mse_loss


def _compare(make: Callable[[], Any], count: int, **options: Any) -> Any:
    """Compare steps and a call of a pipeline with the loop of eager, with a reset between. Return the pipeline."""
    model, eager = make(), make()
    eager.load_state_dict(model.state_dict())
    pipe = pc.compile(model, 2, n_microbatches=count, loss_fn=_loss, cost="analytic", **options)
    for at in range(5):
        x = torch.randn(2 * count, 4)
        if at == 3:
            model.reset(), eager.reset()
        pipe.step(x, target=x)
        for part in x.chunk(count):
            (_loss(eager(part), part) / count).backward()
        torch.testing.assert_close(model.state(), eager.state())
        for one, other in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
    x = torch.randn(2 * count, 4)
    with torch.no_grad():
        torch.testing.assert_close(pipe(x), torch.cat([eager(part) for part in x.chunk(count)]))
    torch.testing.assert_close(model.state(), eager.state())
    return pipe


@pytest.mark.parametrize("make", [Recurrent, Cell, InDict, Delayed, Aliased], ids=lambda one: one.__name__)
@pytest.mark.parametrize("options", [{}, {"checkpoint": "always"}, {"dispatch": "threads"}], ids=str)
def test_tensors_that_a_call_reads_and_replaces_are_state(make, options):
    _compare(make, 2, **options)


@pytest.mark.parametrize("make", [Recurrent, Cell, InDict, Delayed], ids=lambda one: one.__name__)
def test_state_of_one_shape_is_recorded_once_and_can_be_cut_inside_of_a_submodule(make):
    pipe = _compare(lambda: Inside(make), 1)
    assert pipe.explain().traces == 1


@pytest.mark.parametrize("make", [RecurrentFromNone, lambda: Inside(RecurrentFromNone)], ids=["root", "submodule"])
def test_state_that_begins_as_none_has_a_recording_of_its_own(make):
    assert _compare(make, 1).explain().traces == 2


def test_a_memory_that_grows_is_recorded_until_it_is_full():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pc.RecordingWarning)
        _compare(Memory, 1)


@pytest.mark.parametrize("make", [RecurrentFromNone, Memory], ids=lambda one: one.__name__)
def test_several_microbatches_of_which_each_is_another_recording_are_refused(make):
    model = make()
    pipe = pc.compile(model, 2, n_microbatches=2, loss_fn=_loss, cost="analytic")
    x = torch.randn(4, 4)
    with pytest.raises(TraceError, match=r"PC114.*(?s:.)*another recording than the first(?s:.)*n_microbatches=1"):
        pipe.step(x, target=x)
    assert not torch.is_tensor(getattr(model, "h", None))


def test_a_list_of_microbatches_is_refused_as_well():
    pipe = pc.compile(RecurrentFromNone(), 2, loss_fn=_loss, cost="analytic")
    parts = [pc.Microbatch(torch.randn(2, 4), target=torch.randn(2, 4)) for _ in range(2)]
    with pytest.raises(TraceError, match="another recording than the first"):
        pipe.step(microbatches=parts)


def test_the_users_own_tensor_stays_as_it_is_and_serves_again():
    model, start, x = Recurrent(), torch.ones(2, 4), torch.randn(2, 4)
    pipe = pc.compile(model, 2, n_microbatches=1, loss_fn=_loss, cost="analytic")
    losses = []
    for _ in range(2):
        model.h = start
        losses.append(float(pipe.step(x, target=x)))
        assert torch.equal(start, torch.ones(2, 4))
        assert not torch.equal(model.h, start)
    assert losses[0] == losses[1]
    assert pipe.explain().traces == 1


def test_a_single_sample_has_state_of_its_own_size():
    model, eager = Recurrent(), Recurrent()
    eager.load_state_dict(model.state_dict())
    model.h, eager.h = torch.ones(1, 4), torch.ones(1, 4)
    pipe = pc.compile(model, 2, n_microbatches=1, loss_fn=_loss, cost="analytic")
    for _ in range(3):
        x = torch.randn(1, 4)
        torch.testing.assert_close(pipe.step(x, target=x), _loss(eager(x), x))
    assert pipe.explain().traces == 1


def test_a_graph_that_runs_alone_carries_tensors_of_one_shape():
    torch.manual_seed(0)
    model, x = Recurrent(), torch.randn(2, 4)
    eager = copy.deepcopy(model)
    graph = pc.trace(model, x)
    for _ in range(3):
        torch.testing.assert_close(graph(x), eager(x))


class Buffers(_Net):
    """`far` is registered last, and takes what `near`, which is written before, held."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("near", torch.zeros(4))
        self.register_buffer("far", torch.ones(4))

    def reset(self) -> None:
        pass

    def forward(self, x):
        h = torch.tanh(self.first(x) + self.second(x))
        self.far, self.near = self.near, h.detach().mean(0)
        return self.last(h)

    def state(self) -> list[torch.Tensor]:
        return [self.near, self.far]


class Swapped(Buffers):
    """Whichever buffer is written first, the other takes what it held before."""

    def forward(self, x):
        h = torch.tanh(self.first(x) + self.second(x)) + self.near
        self.far, self.near = self.near, self.far
        return self.last(h)


@pytest.mark.parametrize("make", [Buffers, Swapped])
def test_a_buffer_takes_what_another_held_before(make):
    _compare(make, 2)


class MovingMean(_Net):
    """State without the size of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.mean = torch.zeros(4)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        y = self.second(h) + self.mean
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return self.last(y)


def test_state_without_the_size_of_the_batch_serves_uneven_micro_batches():
    model, eager = MovingMean(), MovingMean()
    eager.load_state_dict(model.state_dict())
    pipe = pc.compile(model, 2, n_microbatches=4, loss_fn=_loss, cost="analytic")
    for samples in (8, 10, 7):
        x = torch.randn(samples, 4)
        expected = sum(_loss(eager(part), part) * len(part) / samples for part in x.tensor_split(4))
        torch.testing.assert_close(pipe.step(x, target=x), expected)
        torch.testing.assert_close(model.mean, eager.mean)
    assert pipe.explain().traces == 1
