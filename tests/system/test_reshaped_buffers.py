"""Buffers that a forward replaces by another shape, another dtype, or for None: left on the model as eager leaves them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc


class Buffered(nn.Module):
    """A buffer `held` of any value at first, which the forward of a subclass replaces."""

    first: Any = torch.zeros(0)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("held", copy.copy(self.first))


class Missing(Buffered):
    """A table that is made if it is missing."""

    first = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.held is None:
            self.held = torch.arange(4.0)
        return self.b(self.a(x) * self.held)


class Resized(Buffered):
    """A table of the size of the input, as the relative positions of ConViT."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.held.shape[0] != x.shape[1]:
            self.held = torch.arange(float(x.shape[1]))
        return self.b(self.a(x) * self.held)


class Latest(Buffered):
    """The activations of the last call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        self.held = h.detach()
        return self.b(h)


class Converted(Buffered):
    """A table that is converted once; the second conversion returns its own argument."""

    first = torch.ones(4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.held = self.held.to(x.dtype)
        return self.b(self.a(x) * self.held)


class Remembering(Buffered):
    """A membrane potential: the next call adds what this one left."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        if self.held.shape == h.shape:
            h = h + self.held
        self.held = h.detach()
        return self.b(h)


class Writing(Buffered):
    """From the second call on, it writes in place: what `add_` returns is its own argument."""

    first = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        if self.held is not None:
            h.add_(1.0)
        self.held = torch.arange(4.0)
        return self.b(h)


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def _compiled(model: nn.Module) -> pc.Pipeline:
    return pc.compile(
        model, 2, example_args=(torch.randn(4, 4),), n_microbatches=2, loss_fn=_loss, cost="analytic", partitioner="dp", dispatch="inline"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "recordings"), [(Missing, 2), (Resized, 2), (Latest, 1), (Converted, 2)], ids=lambda one: str(one)
)
def test_a_replaced_buffer_is_left_as_in_eager(kind: type[nn.Module], recordings: int) -> None:
    model = kind()
    twin = copy.deepcopy(model)
    pipe = _compiled(model)
    assert model.held is kind.first or torch.equal(model.held, kind.first)  # compiling leaves the model as it was
    for size in (4, 4, 6):
        batch = torch.randn(size, 4)
        for each in (model, twin):
            each.zero_grad()
        pipe.step(batch)
        for part in batch.chunk(2):
            (_loss(twin(part)) / 2).backward()
        assert torch.equal(model.held, twin.held)
        assert model.held.dtype == twin.held.dtype
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert pipe.explain().traces == recordings  # a table that is there now is read from the second step on


class Watching(nn.Module):
    """Leaves activations in a buffer that it does not read, which has their shape on the mini-batch or on a micro-batch."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(samples, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x).relu()
        self.seen = h.detach()
        return self.b(h)


@pytest.mark.parametrize("samples", [2, 4])
def test_a_buffer_with_rows_of_samples_that_nothing_reads_binds_no_batch_size(samples: int) -> None:
    model, batch = Watching(samples), torch.randn(4, 4)
    twin = copy.deepcopy(model)
    pipe = _compiled(model)
    for _ in range(2):
        pipe.step(batch)
        assert torch.equal(model.seen, twin.a(batch[2:]).relu())  # as the loop over micro-batches leaves it
    pipe.eval()
    assert torch.equal(pipe(batch), twin(batch))
    assert pipe.graph.facts.batch_size is None


class Recurrent(Watching):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = (self.a(x) + self.seen).tanh().detach()
        return self.b(self.seen)


def test_a_buffer_with_rows_of_samples_that_the_next_call_reads_is_carried() -> None:
    model, batch = Recurrent(2), torch.randn(4, 4)
    twin = copy.deepcopy(model)
    pipe = _compiled(model)
    for _ in range(2):
        pipe.step(batch)
        for part in batch.chunk(2):
            twin(part)
        assert torch.equal(model.seen, twin.seen)


def test_what_the_user_puts_in_the_place_of_a_table_is_read() -> None:
    model = Missing()
    pipe = _compiled(model)
    pipe.step(torch.randn(4, 4))
    model.held = torch.full((4,), 7.0)
    twin = copy.deepcopy(model)
    batch = torch.randn(4, 4)
    assert float(pipe.step(batch)) == pytest.approx(_loss(twin(batch)).item(), rel=1e-6)


@pytest.mark.parametrize("kind", [Remembering, Writing])
def test_a_buffer_that_decides_in_the_next_call_is_refused_with_its_name(kind: type[nn.Module]) -> None:
    with pytest.raises(pc.TraceError, match=r"PC114[\s\S]*changes held, and the next call"):
        _compiled(kind())
