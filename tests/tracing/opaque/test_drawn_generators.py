"""Generator objects that a model draws from: found in its graph, put back after measuring, and set for a recomputation."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.costs.profile import Repeats, profiled_costs
from pipecompile.tracing.opaque.drawn_generators import drawn_generators
from tests.support.eager import assert_same

pytestmark = pytest.mark.filterwarnings("ignore::pipecompile.RecordingWarning")


class Drawing(nn.Module):
    """Draws from generators of torch that it holds or is given, and from one of numpy in a piece kept whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.generator, self.numbers = torch.Generator().manual_seed(1), np.random.default_rng(1)
        self.unused = torch.Generator()

    def forward(self, x, given=None):
        x = self.first(x) + torch.rand(x.shape, generator=self.generator)
        x = x * torch.empty_like(x).bernoulli_(0.5, generator=given)
        return self.second(self.scaled(x))

    def scaled(self, x):
        return x * float(self.numbers.uniform(0.5, 2))

    def states(self) -> tuple[Any, ...]:
        return self.generator.get_state().tolist(), self.numbers.bit_generator.state


def test_generators_are_those_of_nodes_and_of_pieces() -> None:
    model = Drawing()
    graph = pc.trace(model, torch.randn(4, 4))
    assert {id(one) for one in drawn_generators(graph, graph.graph.nodes)} >= {id(model.generator), id(model.numbers)}
    no_pieces = [node for node in graph.graph.nodes if node.op != "call_module"]
    assert drawn_generators(graph, no_pieces) == [model.generator]


def test_measuring_draws_nothing() -> None:
    model, given = Drawing(), torch.Generator().manual_seed(1)
    x = torch.randn(4, 4)
    graph = pc.trace(model, x, given)
    before = model.states(), given.get_state()
    profiled_costs(graph, [x, given][: len(graph.graph.find_nodes(op="placeholder"))], repeats=Repeats(1, 1))
    assert before[0] == model.states()
    assert torch.equal(before[1], given.get_state())


@pytest.mark.parametrize("options", [{"cost": "analytic", "checkpoint": "always"}, {}], ids=["recomputed", "measured"])
def test_a_step_draws_as_the_loop(options: Any) -> None:
    torch.manual_seed(0)
    model, given, own = Drawing(), torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    eager = copy.deepcopy(model)
    eager.generator = torch.Generator().manual_seed(1)
    pipe = pc.compile(model, 2, n_microbatches=3, loss_fn=F.mse_loss, **options)
    x, target = torch.randn(9, 4), torch.randn(9, 4)
    for _ in range(2):
        pipe.step(x, given, target=target)
        for a, b in zip(x.chunk(3), target.chunk(3), strict=True):
            (F.mse_loss(eager(a, own), b) / 3).backward()
        assert model.states() == eager.states()
        assert torch.equal(given.get_state(), own.get_state())
    assert_same(model, eager, 1e-6)
