from __future__ import annotations

import pytest
import torch
from torch import nn

from pipecompile.graph.colocation import compute_nodes
from pipecompile.tracing import trace
from tests.support.cuts import cut, run_stages


class Body(nn.Module):
    def __init__(self, body) -> None:
        super().__init__()
        self.a, self.b, self.c, self.body = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def without_gradient(m, x):
    h = m.a(x)
    with torch.no_grad():
        k = m.b(h).softmax(-1) * 2
        with torch.enable_grad():
            k = k * m.b(h)
        k = k + 1
    return m.c(h * k)


def low_precision(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        h = m.b(m.a(x))
        with torch.autocast("cpu", enabled=False):
            h = m.c(h.float()) * 2
        h = h @ x.T @ h
    return h.float()


def weights_cast_once(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        h = m.a(x)
        with torch.autocast("cpu", enabled=False):
            h = h.float() @ m.a.weight
        return h @ m.a.weight


def both(m, x):
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        h = m.a(x)
    with torch.inference_mode():
        ones = torch.ones(4) * 2
    return m.b(h.float()) * ones.clone()


BODIES = [without_gradient, low_precision, both]


def rows(size: int) -> tuple[torch.Tensor]:
    return (torch.randn(size, 4, generator=torch.Generator().manual_seed(size)),)


@pytest.mark.parametrize("body", [*BODIES, weights_cast_once])
def test_regions_are_kept(agrees, body):
    agrees(Body(body), rows)


@pytest.mark.parametrize("body", BODIES)
def test_regions_survive_a_cut_anywhere_inside(body):
    model = Body(body)
    (x,) = rows(3)
    graph = trace(model, x)
    expected = model(x)
    gradients = torch.autograd.grad(expected.sum(), list(model.parameters()), allow_unused=True)
    for bound in range(len(compute_nodes(graph))):
        made = run_stages(graph, cut(graph, [bound]), 3, x)
        assert torch.equal(made, expected)
        found = torch.autograd.grad(made.sum(), list(model.parameters()), allow_unused=True)
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(found, gradients, strict=True))


@pytest.mark.parametrize("enabled", [True, False])
def test_outside_the_regions_the_grad_mode_is_the_callers(enabled):
    with torch.set_grad_enabled(not enabled):
        graph = trace(Body(without_gradient), *rows(2))
    with torch.set_grad_enabled(enabled):
        assert graph(*rows(2)).requires_grad == enabled
        assert torch.is_grad_enabled() == enabled


def test_autocast_around_the_recording_is_the_callers_business():
    model = Body(lambda m, x: m.a(x))
    graph = trace(model, *rows(2))
    with torch.autocast("cpu", torch.bfloat16):
        assert graph(*rows(2)).dtype is torch.bfloat16
        assert trace(model, *rows(2))(*rows(2)).dtype is torch.bfloat16
