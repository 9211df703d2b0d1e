"""Side branches, which leave tensors with gradients on the model: where they begin, and the gradients of a loss that reads the tensors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.graph.colocation import compute_nodes
from pipecompile.graph.left_branches import anchored_branches

N = 2


class Auxiliary(nn.Module):
    """Leaves terms for the loss, each of its own kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layers = kind, nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.head, self.branch = nn.Linear(6, 3), nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        self.aux: Any = None
        self.terms: list[Any] = []
        self.seen: Any = None
        self.branch[2].register_forward_hook(lambda _layer, _inputs, output: setattr(self, "seen", output))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, h = x, x
        for number, layer in enumerate(self.layers):
            first, h = (h, layer(h).tanh()) if number == 2 else (first, layer(h).tanh())
        if self.kind == "attribute":
            self.aux = self.branch[1](self.branch[0](first)).square().mean()
        elif self.kind == "of inputs":
            self.aux = self.branch(x).square().mean()
        elif self.kind == "two sources":
            self.aux = (self.branch[0](first) * h).mean()
        elif self.kind == "list":
            self.terms.append(self.branch[0](first).exp().mean())
        elif self.kind == "hook":
            self.branch(first)
        return self.head(h)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """A loss with what forward has left."""
        left = [self.aux, *self.terms[-1:], None if self.seen is None else self.seen.square().mean()]
        return F.cross_entropy(output, target) + sum(one for one in left if one is not None)


KINDS = ("attribute", "of inputs", "two sources", "list", "hook")


@pytest.mark.filterwarnings("ignore::pipecompile.RecordingWarning")
@pytest.mark.parametrize("options", [{}, {"checkpoint": "always"}, {"schedule": "zb-h1"}, {"n_stages": 7}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(10)
def test_a_loss_that_reads_what_a_branch_has_left_gives_the_gradients_of_the_loop(
    kind: str, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = Auxiliary(kind).double()
    twin = Auxiliary(kind).double()
    twin.load_state_dict(copy.deepcopy(model.state_dict()))
    settings = {"n_stages": 4, "n_microbatches": N, "cost": "analytic"} | options
    pipe = pc.compile(model, loss_fn=model.loss, dispatch="inline", **settings)
    for _ in range(2):
        x, target = torch.randn(4, 6, dtype=torch.float64), torch.randint(3, (4,))
        pipe.step(x, target=target)
        for part, its_target in zip(x.chunk(N), target.chunk(N), strict=True):
            (twin.loss(twin(part), its_target) / N).backward()
    for (name, own), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (own.grad is None) == (other.grad is None), name
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("recorded_with_gradients", [True, False])
def test_a_branch_begins_at_the_last_node_outside_that_has_a_gradient(recorded_with_gradients: bool) -> None:
    def branches(kind: str) -> list[list[str]]:
        with torch.set_grad_enabled(recorded_with_gradients):
            graph = pc.trace(Auxiliary(kind), torch.randn(4, 6))
        return [[node.name for node in one] for one in anchored_branches(graph, compute_nodes(graph))]

    assert branches("attribute")[0][0] == "tanh_1"
    assert branches("of inputs")[0][0] == "head"
    assert branches("two sources")[0][0] == "tanh_4"
    assert branches("none") == []


def test_what_is_left_without_a_gradient_is_no_branch() -> None:
    class Detached(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self[0](x)
            self.seen, self.best = h.detach().mean(), h.argmax(1)
            return self[1](h)

    graph = pc.trace(Detached(nn.Linear(3, 3), nn.Linear(3, 3)), torch.randn(4, 3))
    assert anchored_branches(graph, compute_nodes(graph)) == []
