"""Experiments find the law of a call: how its result for a batch follows from those for two parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.batching.merging import MergeKind, MergeRule
from pipecompile.graph.batch_probes import BatchProbes, Finding
from pipecompile.graph.colocation import compute_nodes


class Model(nn.Module):
    def __init__(self, ends: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.ends = ends

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ends(x)


def found(ends: Callable[[torch.Tensor], torch.Tensor]) -> Finding:
    graph = pc.trace(Model(ends), torch.ones(4, 6))
    placeholder, nodes = next(iter(graph.graph.nodes)), compute_nodes(graph)
    (finding,) = BatchProbes(graph).laws(nodes, {placeholder: MergeRule(MergeKind.JOINED, 0)}, [(nodes[-1], 0)])
    return finding


@pytest.mark.parametrize(
    ("kind", "ends"),
    [
        (MergeKind.JOINED, lambda x: torch.einsum("bi->b", x)),
        (MergeKind.ADDED, lambda x: (x > 0).sum()),
        (MergeKind.AVERAGED, lambda x: F.mse_loss(x, x.exp())),
        (MergeKind.MAXIMUM, lambda x: (x > 1.5).any()),
        (MergeKind.MINIMUM, lambda x: (x > -9).all(0)),
        (MergeKind.LOGSUMEXP, lambda x: x.logsumexp(0)),
        (MergeKind.LAST, lambda x: x[-1]),
        (None, lambda x: x.median(0).values),
        (None, lambda x: x.argmax(0).mode().values),
        (None, lambda x: x.nanmean()),
        (MergeKind.ADDED, lambda x: x.nansum()),
        *((None, lambda x, i=i: F.cross_entropy(x, x.argmax(1), ignore_index=i)) for i in (0, 5)),
    ],
)
def test_laws(kind: MergeKind | None, ends: Callable[[torch.Tensor], torch.Tensor]) -> None:
    finding = found(ends)
    assert finding.is_tested
    assert (finding.rule and finding.rule.kind) is kind


def test_random_draws_cannot_be_tried_and_the_generator_stays_as_it_was() -> None:
    before = torch.get_rng_state()
    assert not found(lambda x: F.dropout(x.flip(0))).is_tested
    assert found(lambda x: x.flip(0)).rule is None
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ignored", [-100, -1, 255, 4])
@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        (None, F.cross_entropy),
        (None, lambda y, t, **ignored: F.cross_entropy(y, t, label_smoothing=0.1, **ignored)),
        (None, lambda y, t, **ignored: F.nll_loss(y, t, **ignored)),
        (None, lambda y, t, **ignored: nn.CrossEntropyLoss(**ignored)(y, t) + y.logsumexp(1).square().mean()),
        (MergeKind.ADDED, lambda y, t, **ignored: F.cross_entropy(y, t, reduction="sum", **ignored)),
    ],
)
def test_a_class_that_the_loss_ignores_is_drawn(
    kind: MergeKind | None, loss: Callable[..., torch.Tensor], ignored: int
) -> None:
    class Loss(nn.Module):
        def forward(self, y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return loss(y, t, ignore_index=ignored)

    graph = pc.trace(Loss(), torch.randn(4, 6), torch.randint(4, (4,)))
    inputs, nodes = [node for node in graph.graph.nodes if node.op == "placeholder"], compute_nodes(graph)
    rules = dict.fromkeys(inputs, MergeRule(MergeKind.JOINED, 0))
    (finding,) = BatchProbes(graph).laws(nodes, rules, [(nodes[-1], 0)])
    assert finding.is_tested
    assert (finding.rule and finding.rule.kind) is kind


class Speech(nn.Module):
    """A CTC loss of flattened targets, as transformers writes it: it runs on random inputs only if all targets are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.head(x).log_softmax(-1).transpose(0, 1)  # (time, batch, classes)
        times = torch.full((len(x),), x.shape[1])
        chosen = labels > 0
        return F.ctc_loss(scores, labels.masked_select(chosen), times, chosen.sum(-1))


def test_a_loss_that_runs_in_one_trial_alone_is_not_that_of_any_microbatch() -> None:
    torch.manual_seed(0)
    model = Speech()
    labels = torch.tensor([[1, 2, 0], [3, 1, 0], [2, 4, 0], [1, 1, 0], [4, 2, 0]])
    x = torch.randn(5, 9, 6)
    pipe = pc.compile(model, 1, n_microbatches=2, cost="analytic", devices=["cpu"])
    with torch.no_grad():
        torch.testing.assert_close(pipe(x, labels), model(x, labels))


def test_infinity_is_no_proof_of_a_law() -> None:
    finding = found(lambda x: (x.square().mean() + 1) / 0)
    assert finding.rule is None
    assert not finding.is_tested
