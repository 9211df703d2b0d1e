"""The flow of a batch: each value's rule follows from those of the values that it is computed from."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import pipecompile as pc
from pipecompile.batching.merging import MergeKind
from pipecompile.graph.batch_flow import MERGED, BatchFlow


class Model(nn.Module):
    def __init__(self, ends: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.ends = nn.Linear(3, 6), ends

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ends(self.a(x))


def flow_of(ends: Callable[[torch.Tensor], torch.Tensor]) -> BatchFlow:
    return BatchFlow(pc.trace(Model(ends), torch.randn(4, 3)))


def kind(flow: BatchFlow) -> MergeKind:
    (node,) = flow.graph.graph.output_node().args[0]  # type: ignore[misc]
    return flow.rule(node).kind  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("expected", "ends"),
    [
        (MergeKind.JOINED, lambda y: F.normalize(y.relu() + 1, dim=1) @ torch.ones(6, 2)),
        (MergeKind.JOINED, lambda y: y.view(-1, 2, 3).transpose(1, 2).reshape(len(y), 6)),
        (MergeKind.SAME, lambda y: torch.arange(3) + torch.ones(y.shape[1], 1)),
        (MergeKind.ADDED, lambda y: 2 * y.sum(0) / 3),
        (MergeKind.AVERAGED, lambda y: (y.sum(1) / len(y)).sum() + 1),
        (MergeKind.MAXIMUM, lambda y: y.amax(0).exp()),
        (MergeKind.MAXIMUM, lambda y: y.max() > 100.0),
        (MergeKind.COMPUTED, lambda y: y.mean().exp()),
        (MergeKind.COMPUTED, lambda y: y - y.mean(0)),
        (MergeKind.COMPUTED, lambda y: y[:2]),
        (MergeKind.COMPUTED, lambda y: y.pinverse().T),
        (MergeKind.COMPUTED, lambda y: y.softmax(0) @ torch.ones(6, 2)),
    ],
)
def test_rules_are_derived_call_by_call(expected: MergeKind, ends: Callable[[torch.Tensor], torch.Tensor]) -> None:
    flow = flow_of(ends)
    assert kind(flow) is expected
    assert (expected in MERGED) is (expected is not MergeKind.COMPUTED)


def test_the_call_that_mixes_samples_is_named() -> None:
    flow = flow_of(lambda y: y.relu().flip(0).exp())
    assert [str(node.target) for node in flow.mixing] == ["flip"]


def written(y: torch.Tensor, rows: slice) -> torch.Tensor:
    out = torch.zeros_like(y)
    out[rows] = y[rows] * 2
    return out + 1


def test_a_value_written_in_place_has_the_rule_after_the_write() -> None:
    assert kind(flow_of(lambda y: written(y, slice(None)))) is MergeKind.JOINED
    assert kind(flow_of(lambda y: written(y, slice(1, None)))) is MergeKind.COMPUTED
    assert kind(flow_of(lambda y: torch.zeros(6).add_(y.amin(0)))) is MergeKind.MINIMUM


class Kept(nn.Module):
    def forward(self, rows: torch.Tensor, owners: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (rows, owners) if rows.sum() > -1e6 else (-rows, owners)


class Graphs(nn.Module):
    """Three nodes a graph, as rows, with the number of the graph of each: what PyG's pooling makes of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = Kept()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        owners = torch.arange(len(x)).repeat_interleave(3)
        rows, owners = self.kept(x.reshape(-1, 2), owners)
        return rows.new_zeros(len(x), 2).index_add(0, owners, rows)


def test_positions_in_the_batch_that_pass_a_piece_kept_whole_are_not_joined() -> None:
    """They were joined as rows: graph 0 of the second micro-batch was added to graph 0 of the first."""
    pipe = pc.compile(Graphs(), 1, n_microbatches=2, cost="analytic", devices=["cpu"])
    x = torch.randn(4, 3, 2)
    torch.testing.assert_close(pipe(x), x.sum(1))


class Meeting(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows - rows.mean(0) if rows.sum() > -1e6 else rows


class Places(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.arange(len(rows)) + rows[:, 0] if rows.sum() > -1e6 else rows


class Apart(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.relu() if rows.sum() > -1e6 else rows


class Mute(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if rows.abs().max() < 0.5 else {}["no values for an experiment"]


@pytest.mark.parametrize(("part", "is_joined"), [(Meeting(), False), (Places(), False), (Apart(), True)])
def test_a_piece_kept_whole_is_tried(part: nn.Module, is_joined: bool) -> None:
    """Its rows were joined because there is one a sample, although samples meet inside, or count their places."""
    model, x = nn.Sequential(nn.Linear(3, 2), part), torch.randn(4, 3)
    pipe = pc.compile(model, 1, n_microbatches=2, cost="analytic", devices=["cpu"])
    torch.testing.assert_close(pipe(x), model(x))
    assert (kind(BatchFlow(pipe.graph)) is MergeKind.JOINED) is is_joined


class Lengths(nn.Module):
    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.cell, self.mixes = nn.LSTM(3, 4, batch_first=True), mixes

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, (last, _) = self.cell(packed)
        return last[0] * last.mean() if self.mixes else last[0]


@pytest.mark.parametrize("mixes", [False, True])
def test_samples_stay_apart_in_packed_sequences(mixes: bool) -> None:
    flow = BatchFlow(pc.trace(Lengths(mixes), torch.randn(4, 6, 3), torch.tensor([2, 6, 1, 4])))
    assert (kind(flow) is MergeKind.JOINED) is not mixes


def test_a_piece_that_cannot_be_tried_is_warned_of() -> None:
    pipe = pc.compile(nn.Sequential(nn.Sigmoid(), Mute()), 1, n_microbatches=2, cost="analytic", devices=["cpu"])
    with pytest.warns(pc.RecordingWarning, match="could not be tried"):
        pipe(-torch.rand(4, 3) - 1)


def sorted_by_expert(y: torch.Tensor) -> torch.Tensor:
    """Mixture of three experts: rows sorted by expert, a matrix per expert, and the rows in order again."""
    expert = y[:, :3].argmax(1)
    order = expert.argsort()
    ends = torch.histc(expert.float(), 3, 0, 2).cumsum(0)
    owner = (torch.arange(len(y))[:, None] >= ends).sum(1)
    weights = torch.arange(108.0).sin().view(3, 6, 6)
    out = (y[order].unsqueeze(1) @ weights[owner]).squeeze(1).relu()
    back = torch.empty_like(order)
    back[order] = torch.arange(len(y))
    return out[back] * y.sigmoid()


def added_by_expert(y: torch.Tensor) -> torch.Tensor:
    """The same with the rows added in place to zeros."""
    order = y[:, :3].argmax(1).argsort()
    return torch.zeros_like(y).index_add_(0, order, y[order].exp())


def with_capacity(y: torch.Tensor) -> torch.Tensor:
    """An expert takes two rows of three of the mini-batch: which rows are dropped depends on all samples."""
    chosen = F.one_hot(y[:, :3].argmax(1), 3).float()
    place = (chosen.cumsum(0) * chosen).sum(1)
    kept = (place <= 2 * len(y) // 3).float()
    slots = F.one_hot(place.long(), 100).float() * kept[:, None]
    return slots @ (slots.t() @ y)


@pytest.mark.parametrize("ends", [sorted_by_expert, added_by_expert])
def test_rows_that_are_sorted_and_brought_back_are_joined(ends: Callable[[torch.Tensor], torch.Tensor]) -> None:
    flow = flow_of(ends)
    assert kind(flow) is MergeKind.JOINED
    assert flow.mixing  # the sort by itself
    x = torch.randn(7, 3)
    module = Model(ends).eval()
    torch.testing.assert_close(module(x), torch.cat([module(x[:4]), module(x[4:])]))


def test_rows_that_a_capacity_drops_are_not_joined() -> None:
    assert kind(flow_of(with_capacity)) is MergeKind.COMPUTED


@pytest.mark.parametrize(
    "ends",
    [
        lambda y: y[:, None] * torch.rand(len(y), 3)[..., None],
        lambda y: (y * torch.randint(4, (len(y),))[:, None].cos()).sum(1),
        lambda y: y * torch.empty([len(y), 1]).bernoulli_(0.5).div_(0.5),
        lambda y: y[:, :3] + torch.linalg.cholesky(torch.eye(3).expand(len(y), 3, 3) + torch.ones(3, 3)).sum(1),
    ],
)
def test_rows_of_the_batch_size_alone_are_joined(ends: Callable[[torch.Tensor], torch.Tensor]) -> None:
    flow = flow_of(ends)  # drawn numbers and expanded constants: computed from no sample
    assert kind(flow) is MergeKind.JOINED
    assert not [*flow.guessed, *flow.mixing]


def test_positions_in_the_batch_are_no_such_rows() -> None:
    assert kind(flow_of(lambda y: y * torch.arange(len(y))[:, None].cos())) is MergeKind.COMPUTED
    assert kind(flow_of(lambda y: y.sum(0) / torch.ones(len(y)).sum())) is MergeKind.AVERAGED


class Filter(nn.Module):
    """Follow a hidden state with a covariance that no observation changes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Parameter(torch.eye(3) * 0.9), nn.Parameter(torch.ones(2, 3))

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        state, covariance = seen.new_zeros(len(seen), 3), torch.eye(3).expand(len(seen), -1, -1)
        for t in range(seen.shape[1]):
            state, covariance = state @ self.a.T, self.a @ covariance @ self.a.T + torch.eye(3)
            factor = torch.linalg.cholesky(self.c @ covariance @ self.c.T + torch.eye(2))
            gain = torch.cholesky_solve(self.c @ covariance, factor).mT
            state = state + (gain @ (seen[:, t] - state @ self.c.T)[..., None])[..., 0]
            covariance = covariance - gain @ self.c @ covariance
        return state


def test_a_long_chain_of_such_rows_is_joined() -> None:
    flow = BatchFlow(pc.trace(Filter(), torch.randn(4, 8, 2)))
    assert kind(flow) is MergeKind.JOINED
    assert not [*flow.guessed, *flow.mixing]


class Potential(nn.Module):
    """An energy and its gradient, as interatomic potentials and physics-informed networks have them."""

    def __init__(self, inner: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.energy = inner, nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.energy(self.inner(x))
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(force[:, 0].sum(), x)
        return -second


def test_gradients_of_each_sample_are_joined_by_proof() -> None:
    for graded in (True, False):
        with torch.set_grad_enabled(graded):
            flow = BatchFlow(pc.trace(Potential(torch.tanh), torch.randn(4, 3)))
        assert kind(flow) is MergeKind.JOINED
        assert not [*flow.guessed, *flow.mixing]


def test_gradients_through_samples_that_meet_are_not_proven() -> None:
    flow = BatchFlow(pc.trace(Potential(lambda x: x * x.cos().sum(0)), torch.randn(4, 3)))
    assert flow.guessed or flow.mixing


def test_gradients_that_stop_at_no_grad_are_those_of_the_graph() -> None:
    class Stopped(Potential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.detach().requires_grad_()
            with torch.no_grad():
                scale = x.sin()
            return torch.autograd.grad((self.energy(x) * scale).sum(), x)[0]

    flow = BatchFlow(pc.trace(Stopped(torch.tanh), torch.randn(4, 3)))
    assert kind(flow) is MergeKind.JOINED
    assert not [*flow.guessed, *flow.mixing]
