from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.graph.risks import risks
from pipecompile.tracing import trace


class Body(nn.Module):
    def __init__(self, body) -> None:
        super().__init__()
        self.layer, self.body = nn.Linear(4, 4), body

    def forward(self, x):
        return self.body(self.layer(x))


@pytest.mark.parametrize(
    "body, drawn",
    [
        (lambda x: F.dropout(x, 0.5), 1),
        (lambda x: F.dropout(x, 0.5, training=False), 0),
        (lambda x: F.dropout(x, 0.0), 0),
        (lambda x: x + torch.rand_like(x) + torch.randn(4), 2),
        (lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.1), 1),
        (lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None]), 0),
        (lambda x: x.relu(), 0),
    ],
)
def test_randomness_is_found_where_it_is_drawn(body, drawn):
    model = Body(body)
    found = {risk.kind: risk for risk in risks(model, trace(model, torch.randn(3, 4)))}
    assert found["randomness"].count == drawn if drawn else "randomness" not in found


def test_batch_statistics_are_those_that_a_batch_decides():
    still = nn.BatchNorm1d(4, track_running_stats=False).eval()
    (risk,) = risks(nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4).eval(), still))
    assert (risk.kind, risk.places) == ("batch statistics", ("0", "2"))
    assert "0, 2" in str(risk)


def test_many_places_are_shortened():
    (risk,) = risks(nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(9))))
    assert str(risk).endswith("0, 1, 2, 3 and 5 more")


def test_pieces_kept_whole_are_named_if_they_take_samples():
    class Centred(nn.Module):
        def forward(self, x):
            return x - x.mean(0) if x.sum().item() else x

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.centred, self.b = nn.Linear(4, 4), Centred(), nn.Linear(4, 4)

        def forward(self, x):
            return self.b(self.centred(self.a(x)))

    model = Model()
    found = {risk.kind: risk for risk in risks(model, trace(model, torch.randn(3, 4)))}
    assert found["kept whole"].places == ("centred",)


class Recurrent(nn.Module):
    def __init__(self, h: torch.Tensor | None) -> None:
        super().__init__()
        self.cell, self.h = nn.Linear(4, 4), h

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.cell(x) + (0 if self.h is None else self.h))
        self.h = h.detach().mean(0)
        return h


def test_state_that_compile_carries_is_recorded_and_named() -> None:
    """`trace` and `explain` refused it, though `compile` trains such a model."""
    start = torch.zeros(4)
    model = Recurrent(start)
    risk = "state that a call reads and replaces (1): goes from micro-batch to micro-batch: h"
    assert risk in str(pc.explain(model, torch.randn(4, 4)))
    assert model.h is start
    pipe = pc.compile(model, 1, n_microbatches=2, cost="analytic", devices=["cpu"], example_args=(torch.randn(4, 4),))
    assert str(pipe.graph.graph) == str(pc.trace(model, torch.randn(4, 4)).graph)


def test_state_that_begins_as_none_is_refused_as_compile_does() -> None:
    assert "n_microbatches=1; or begin with a tensor" in str(pc.explain(Recurrent(None), torch.randn(4, 4)))
