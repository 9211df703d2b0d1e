from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import pipecompile as pc
from pipecompile.graph.colocation import compute_ties
from pipecompile.tracing import trace


class Adapted(nn.Module):
    """Meta-learning: the weights of `net` after a step of gradient descent on other samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.net = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, support: Tensor, labels: Tensor, x: Tensor) -> Tensor:
        support, x = self.first(support), self.first(x)
        weights = dict(self.net.named_parameters())
        gradients = torch.autograd.grad(
            cross_entropy(self.net(support), labels), [*weights.values()], create_graph=True
        )
        weights = {name: one - 0.1 * two for (name, one), two in zip(weights.items(), gradients, strict=True)}
        return torch.func.functional_call(self.net, weights, (x,))


def samples() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(8, 8), torch.randint(4, (8,)), torch.randn(8, 8)


def test_layers_that_read_a_differentiated_weight_are_one_path() -> None:
    groups = [" ".join(group) for group in compute_ties(trace(Adapted(), *samples())).groups]
    assert groups == ["net_0 net_1 net_2 cross_entropy grad getitem getitem_1 getitem_2 getitem_3"]


@pytest.mark.filterwarnings("ignore::pipecompile.RecordingWarning")
def test_gradients_of_weights_in_forward_are_those_of_eager() -> None:
    """The cut went through the differentiated layers: the first step failed with a RunError."""
    model, (support, labels, x) = Adapted(), samples()
    eager = copy.deepcopy(model)
    pipe = pc.compile(model, 4, n_microbatches=2, loss_fn=cross_entropy, cost="analytic")
    loss = pipe.step(support, labels, x, target=labels)
    parts = zip(*(value.chunk(2) for value in (support, labels, x)), strict=True)
    losses = [cross_entropy(eager(*part), part[1]) / 2 for part in parts]
    sum(losses).backward()
    assert loss.item() == pytest.approx(sum(losses).item())
    for one, two in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)
