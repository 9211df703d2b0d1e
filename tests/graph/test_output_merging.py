"""Outputs come together as the whole batch would give them, or are refused before anything runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import pipecompile as pc
from pipecompile.batching.merging import MergeKind
from pipecompile.graph.batch_flow import BatchFlow
from pipecompile.graph.colocation import note_ties
from pipecompile.graph.output_merging import join_rules, rows_by_shape


class Head(nn.Module):
    """Two layers, and whatever a test makes of their output."""

    def __init__(self, ends: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.ends = nn.Linear(3, 4), nn.Linear(4, 6), ends

    def forward(self, x: torch.Tensor) -> Any:
        return self.ends(self.b(self.a(x).relu()))


@dataclass
class Made:
    logits: torch.Tensor
    loss: torch.Tensor
    word: str = "yes"


pytree.register_dataclass(Made)

JOINED: dict[str, Callable[[torch.Tensor], Any]] = {
    "as it is": lambda y: y,
    "batch in dimension 1": lambda y: y.T,
    "batch in dimension 2": lambda y: y.view(-1, 2, 3).permute(1, 2, 0),
    "nested": lambda y: {"a": [y, (y.T, None)], "b": "word", "c": 2.5, "n": y.shape[0], "half": y.shape[0] / 2},
    "a dataclass": lambda y: Made(y, y.square().mean()),
    "a comparison of sizes": lambda y: (y, y.shape[0] >= 0),
    "flattened": lambda y: y.view(len(y), 2, 3).flatten(0, 1),
    "flattened to the end": lambda y: y.flatten(),
    "rows repeated": lambda y: y.repeat_interleave(2, 0),
    "rows expanded": lambda y: (y[:, None] * torch.ones(4, 1)).reshape(-1, 6).exp().T,
    "rows of rows": lambda y: F.linear(y.reshape(-1, 3), torch.ones(2, 3)).softmax(-1).reshape(-1).unsqueeze(0),
    "a mean": lambda y: y.mean(),
    "a mean of every feature": lambda y: y.square().mean(0),
    "a sum": lambda y: y.square().sum(),
    "a scaled sum of every feature": lambda y: -(y.sum(0) / 3) * 2,
    "a mean of sums": lambda y: y.square().sum(1).mean(),
    "a mean by hand": lambda y: y.square().sum() / y.shape[0],
    "a sum written in place": lambda y: torch.zeros(6).add_(y.mean(0)),
    "losses of modules": lambda y: (nn.MSELoss(reduction="sum")(y, y * 2), nn.MSELoss()(y, y * 2)),
    "losses": lambda y: (
        F.mse_loss(y, y * 2), F.mse_loss(y, y * 2, reduction="sum"), nn.functional.cross_entropy(y, y.argmax(1))
    ),
    "counts": lambda y: {"right": (y.argmax(1) == 1).sum(), "each": (y > 0).sum(0), "any": (y > 0).count_nonzero()},
    "no sample in it": lambda y: (y, torch.arange(3), torch.tensor(2.0), torch.tensor(7)),
    "unrolled": lambda y: torch.stack([row * 2 for row in y]),
    "unrolled, batch in dimension 1": lambda y: torch.stack([row * 2 for row in y], 1),
    "a list, unrolled": lambda y: list(y.unbind(0)),
    "a list of dicts, unrolled": lambda y: [{"row": row, "sum": row.sum(), "word": "yes"} for row in y],
    "unrolled, with a table as long as the micro-batch": lambda y: (torch.ones(2, 3), torch.stack([*y]), sum(y).sum() * 0),
}  # fmt: skip


COMPUTED: dict[str, Callable[[torch.Tensor], Any]] = {
    "every sample meets every other": lambda y: y @ y.T,
    "one row more": lambda y: torch.cat([y, torch.ones(1, 6)]),
    "blocks": lambda y: torch.cat([y, y]),
    "blocks by reshape": lambda y: y.T.reshape(-1),
    "picked": lambda y: y.repeat_interleave(2, 0)[torch.arange(2 * len(y)).flip(0)],
    "an index": lambda y: y.mean(1).argmax(),
    "in another order": lambda y: (y.flip(0), y),
    "a scan": lambda y: y.cumsum(0),
    "a median and a deviation": lambda y: {"median": y.median(0).values, "std": y.std()},
    "a ratio of sums, of rows that count": lambda y: (y * (y > 0)).sum() / (y > 0).sum(),
    "classes that count": lambda y: F.cross_entropy(y, y.argmax(1).masked_fill(y[:, 0] > 0, -100)),
    "a sum and a constant": lambda y: y.sum() + 1.0,
    "rows and their numbers": lambda y: y + torch.arange(len(y))[:, None],
    "rows divided by their number": lambda y: y / len(y),
    "shifted, written in place": lambda y: shifted(y),
}
MERGED: dict[str, Callable[[torch.Tensor], Any]] = {
    "a maximum": lambda y: (y.max(), y.amax(0), (y > 0.5).any()),
    "a product and a logsumexp": lambda y: (y.square().add(0.5).prod(0), y.logsumexp(0), (y > -9).all()),
    "the first and the last row": lambda y: (y[0], y[-1]),
    "a mean of rows divided by their number": lambda y: (y.square().sum(1) / len(y)).sum(),
    "rows by the number of the row": lambda y: y[torch.arange(len(y)), y.argmax(1)],
}
JOINED |= COMPUTED | MERGED


def shifted(y: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(y)
    out[1:] = y[:-1]
    return out


def parameters_too(model: Head) -> None:
    """An output that only parameters enter."""
    model.ends = lambda y: (y, model.b.weight.square().sum())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", JOINED)
def test_outputs_and_gradients_are_those_of_the_whole_batch(name: str) -> None:
    torch.manual_seed(0)
    model = Head(JOINED[name])
    eager = copy.deepcopy(model)
    pipe = pc.compile(model, 2, cost="analytic", devices=["cpu"] * 2, n_microbatches=3)
    x = torch.randn(6 if "unrolled" in name else 7, 3)
    mine, theirs = pipe(x), eager(x)
    assert pytree.tree_structure(mine) == pytree.tree_structure(theirs)
    for a, b in zip(pytree.tree_leaves(mine), pytree.tree_leaves(theirs), strict=True):
        assert type(a) is type(b)
        torch.testing.assert_close(a, b) if isinstance(a, torch.Tensor) else None
        assert isinstance(a, torch.Tensor) or a == b
    for out in (mine, theirs):
        tensors = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        torch.stack([t.sin().sum() for t in tensors if t.requires_grad] or [model.a.weight.sum() * 0]).sum().backward()
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-5)


def test_a_term_of_parameters_alone_counts_once() -> None:
    model = Head(lambda y: y)
    parameters_too(model)
    pipe = pc.compile(model, 2, cost="analytic", devices=["cpu"] * 2, n_microbatches=4)
    out, penalty = pipe(torch.randn(8, 3))
    assert torch.equal(penalty, model.b.weight.square().sum())
    penalty.backward()
    torch.testing.assert_close(model.b.weight.grad, 2 * model.b.weight.detach())
    assert len(out) == 8


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "a list of samples inside": (lambda y: {"rows": list(y.unbind(0))}, "a list whose length depends"),
    "a number of samples, unrolled": (lambda y: (len([*y]), y), "a number that depends"),
    "reversed, unrolled": (lambda y: torch.stack([*y][::-1]), "depends on other samples"),
    "drawn behind a meeting": (lambda y: F.dropout(y.cumsum(0)), "test_output_merging.py:.*random numbers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_come_together_is_refused_and_trains_all_the_same(name: str) -> None:
    ends, why = REFUSED[name]
    model = Head(ends)
    x = torch.randn(4, 3)

    def loss_fn(out: Any) -> torch.Tensor:
        return torch.stack(
            [t.float().square().mean() for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        ).sum()

    pipe = pc.compile(model, 2, cost="analytic", devices=["cpu"] * 2, n_microbatches=2, loss_fn=loss_fn)
    with pytest.raises(pc.InputError, match=why):
        pipe(x)
    pipe.step(x)
    assert model.a.weight.grad is not None
    pipe.reschedule(n_microbatches=1)
    torch.manual_seed(1)
    output = pipe(x)
    torch.manual_seed(1)
    for mine, theirs in zip(pytree.tree_leaves(output), pytree.tree_leaves(model(x)), strict=True):
        assert torch.allclose(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs


@pytest.mark.parametrize("name", MERGED)
def test_what_merges_is_not_computed_on_the_whole_batch(name: str) -> None:
    graph = note_ties(pc.trace(Head(MERGED[name]), torch.randn(4, 3)))
    assert MergeKind.COMPUTED not in {rule.kind for rule in join_rules(BatchFlow(graph))}


def test_layers_behind_a_meeting_of_samples_run_on_the_whole_batch_with_a_warning() -> None:
    torch.manual_seed(0)
    model = Head(lambda y: y)
    model.ends = nn.Sequential(nn.Softmax(0), nn.Linear(6, 2))
    eager, x = copy.deepcopy(model), torch.randn(7, 3)
    pipe = pc.compile(model, 2, cost="analytic", devices=["cpu"] * 2, n_microbatches=3)
    with pytest.warns(pc.RecordingWarning, match="whole mini-batch"):
        output = pipe(x)
    torch.testing.assert_close(output, eager(x))
    for out in (output, eager(x)):
        out.square().sum().backward()
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_tail_is_for_the_batch_sizes_of_its_recording() -> None:
    model = Head(lambda y: y.flip(0) if len(y) < 4 else y.flip(0) * 2)
    pipe = pc.compile(model, 2, cost="analytic", devices=["cpu"] * 2, n_microbatches=3)
    with pytest.raises(pc.InputError, match="branches on the batch size"):
        pipe(torch.randn(6, 3))


def test_rows_that_have_met_are_rows_by_their_shape() -> None:
    graph = note_ties(pc.trace(Head(lambda y: (y - y.mean(0), y.std(), y.sum())), torch.randn(4, 3)))
    rules = join_rules(BatchFlow(graph))
    assert [rule.kind for rule in rules[:2]] == [MergeKind.COMPUTED] * 2
    found = rows_by_shape(graph, rules)
    assert (found[0].kind, found[0].dim) == (MergeKind.JOINED, 0)
    assert found[1:] == rules[1:]
