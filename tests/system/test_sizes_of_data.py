"""Models that compute on as many rows as the data say, and branch on how many there are: in every step the loss and gradients of the plain loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc

pytestmark = [pytest.mark.smoke, pytest.mark.filterwarnings("ignore::pipecompile.RecordingWarning")]


class Routed(nn.Module):
    """A gate, and four experts between two layers. The forward of a whole model is never kept whole."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.gate, self.o = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))


class Pairs(Routed):
    """An expert has rows and places of them, both of a length that the data decide, often 0."""

    def forward(self, x):
        x = self.a(x)
        scores = self.gate(x)
        best, y = scores.topk(2, 1)[1], torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(best == number)
            y = y.index_add(0, rows, expert(x[rows]) * x[rows, places, None])
        return self.o(y)


class SkipsEmpty(Routed):
    def forward(self, x):
        x = self.a(x)
        scores = self.gate(x)
        best, y = scores.argmax(1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (best == number).nonzero().flatten()
            if rows.numel() == 0:
                continue
            y[rows] = expert(x[rows])
        return self.o(y)


class MeanOrDouble(Routed):
    def forward(self, x):
        x = self.a(x)
        scores = self.gate(x)
        rows = x[scores[:, 0] > 1]
        if len(rows):
            x = x + rows.mean(0)
        if not len(rows):
            x = x * 2
        return self.o(self.experts[0](x))


class More(Routed):
    def forward(self, x):
        x = self.a(x)
        scores = self.gate(x)
        if (scores > 0.5).nonzero().shape[0] > 12:
            x = x * 3
        return self.o(self.experts[0](x))


class Repeated(Routed):
    """Two calls return as many rows, and one writes where the other says."""

    def forward(self, x):
        x = self.a(x)
        scores = self.gate(x)
        counts = scores.argmax(1) + 1
        rows = torch.repeat_interleave(torch.arange(len(x)), counts)
        y = self.experts[0](torch.repeat_interleave(x, counts, 0))
        return self.o(torch.zeros_like(x).index_add(0, rows, y))


class Capacity(Routed):
    def forward(self, x):
        x = self.a(x)
        scores = self.gate(x)
        best = scores.argmax(1)
        hot = F.one_hot(best, 4)
        place = (hot.cumsum(0) * hot).sum(1) - 1
        kept = place < 1
        rows = torch.zeros(4, 1, 8).index_put((best[kept], place[kept]), x[kept])
        y = torch.stack([expert(row) for expert, row in zip(self.experts, rows, strict=True)])
        out = torch.zeros_like(x)
        out[kept] = y[best[kept], place[kept]]
        return self.o(x + out)


class Hits(Routed):
    """A loop over the experts that have rows, as in the mixtures of transformers."""

    def forward(self, x):
        x = self.a(x)
        scores = self.gate(x)
        weights, best = scores.softmax(1).topk(2, 1)
        mask, y = F.one_hot(best, 4).permute(2, 1, 0), torch.zeros_like(x)
        for (number,) in (mask.sum((-1, -2)) > 0).nonzero():
            places, rows = torch.where(mask[number])
            y.index_add_(0, rows, self.experts[number](x[rows]) * weights[rows, places, None])
        return self.o(y)


def plain_step(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    losses = [(model(a) - b).square().mean() / 4 for a, b in zip(x.chunk(4), target.chunk(4), strict=True)]
    for loss in losses:
        loss.backward()
    return sum(loss.detach() for loss in losses)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [Pairs, SkipsEmpty, MeanOrDouble, More, Repeated, Capacity, Hits])
@pytest.mark.parametrize("seed", [1, 2])
def test_each_step_is_that_of_the_loop(kind: Any, seed: int) -> None:
    torch.manual_seed(seed)
    model = kind()
    eager = copy.deepcopy(model)
    pipe = pc.compile(
        model, 2, n_microbatches=4, loss_fn=lambda y, t: (y - t).square().mean(), cost="analytic", across_batch="each"
    )
    for scale in (1.0, 0.1, 3.0, 1.0):
        x, target = scale * torch.randn(16, 8), torch.randn(16, 8)
        model.zero_grad()
        eager.zero_grad()
        torch.testing.assert_close(pipe.step(x, target=target), plain_step(eager, x, target))
        for (name, mine), other in zip(model.named_parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_a_tensor_that_a_statement_may_write_is_copied_at_the_cut() -> None:
    """In the runs that show what a statement writes, an expert had no rows: in another step it wrote what another stage had sent."""
    torch.manual_seed(3)
    model = SkipsEmpty()
    eager = copy.deepcopy(model)
    pipe = pc.compile(
        model, 3, n_microbatches=4, loss_fn=lambda y, t: (y - t).square().mean(), cost="analytic", across_batch="each"
    )
    for number in range(12):
        x, target = (number % 4 + 0.3) * torch.randn(16, 8), torch.randn(16, 8)
        torch.testing.assert_close(pipe.step(x, target=target), plain_step(eager, x, target))


class Large(nn.Module):
    """Branches in a statement that uses nearly all parameters, which is not kept whole: no cut would be left."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.o = nn.Linear(8, 8), nn.Linear(8, 800), nn.Linear(8, 8)

    def forward(self, x):
        rows = self.a(x)[x[:, 0] > 0]
        scale = self.b(rows).mean() if len(rows) else 1.0
        return self.o(self.a(x) * scale)


def test_a_branch_on_no_rows_that_was_not_recorded_is_refused() -> None:
    """The other branch was taken, without a word."""
    torch.manual_seed(0)
    model, x = Large(), torch.randn(6, 8)
    x[:, 0] = torch.tensor([1.0, -1, 1, -1, 1, -1])
    graph = pc.trace(model, x)
    assert torch.equal(graph(x), model(x))
    with pytest.raises(pc.TraceError, match="its sizes: Ne"):
        graph(-x.abs())
