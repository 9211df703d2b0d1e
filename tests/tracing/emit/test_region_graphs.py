"""The code of a graph runs its regions under torch.utils.checkpoint, with the numbers of eager."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from pipecompile.tracing import trace
from tests.support.checkpointed import Functional, built, compiled
from tests.support.eager import accumulate, assert_same, square_loss

REENTRANT = pytest.mark.parametrize("reentrant", [False, True])


def selective(m: Any, x: torch.Tensor) -> torch.Tensor:
    kept = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    return checkpoint(lambda h: m.b(m.a(h).tanh()).sin(), m.a(x), use_reentrant=False, context_fn=kept)


def with_modes(m: Any, x: torch.Tensor) -> torch.Tensor:
    n = len(x)

    def region(h: torch.Tensor, mask: torch.Tensor, times: int) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            size = h.abs().mean()
        with torch.autocast("cpu", torch.bfloat16):
            low = m.b(h)
        u, v = (h * mask).chunk(2, -1)
        return torch.cat([u * size, v], -1) + low, h.view(n, 2, 2).flatten(1) * times

    first, second = checkpoint(region, m.a(x), torch.ones(n, 4), 3, use_reentrant=False)
    return first + second


def twice(m: Any, x: torch.Tensor) -> torch.Tensor:
    """The value of a region, and its input, are used outside as well."""
    h = m.a(x)
    y = checkpoint(lambda z: (m.b(z) + z).relu(), h, use_reentrant=True)
    return y + checkpoint(lambda z, y: (m.b(z) * y).sin(), h, y, use_reentrant=True) * h


def without_early_stop(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        return checkpoint(lambda h: m.norms[0](m.a(h)).detach() + h, m.a(x), use_reentrant=False)


def decorated(m: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda h, *, by: m.b(h).tanh() * by, m.a(x), use_reentrant=False, by=2, determinism_check="none")


@pytest.mark.parametrize(
    "body", [selective, with_modes, twice, without_early_stop, decorated], ids=lambda f: f.__name__
)
def test_other_regions_equal_eager(body):
    model, eager = built(lambda: Functional(body))
    x = torch.randn(6, 4)
    pipe = compiled(model, x, 1)
    assert torch.equal(pipe.step(x), accumulate(eager, x, 1))
    assert_same(model, eager)
    graph = trace(model, x)
    square_loss(graph(x)).backward()
    accumulate(eager, x, 1)
    assert_same(model, eager)


def unused(m: Any, x: torch.Tensor, region: Any) -> torch.Tensor:
    h = m.a(x)
    region(m.norms[0], h)
    return m.b(h)


def partly_detached(m: Any, x: torch.Tensor, region: Any) -> torch.Tensor:
    first, second = region(lambda h: (m.a(h), m.b(h).detach()), m.a(x))
    return first + second


def written_later(m: Any, x: torch.Tensor, region: Any) -> torch.Tensor:
    return region(lambda h: m.b(h).tanh(), m.a(x)).add_(1) ** 2


def with_gradients_inside(m: Any, x: torch.Tensor, region: Any) -> torch.Tensor:
    def penalty(h: torch.Tensor) -> torch.Tensor:
        h = h.detach().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(m.b(h).square().sum(), h, create_graph=True)
        return m.a(gradient)

    return region(penalty, m.a(x))


def integers(m: Any, x: torch.Tensor, region: Any) -> torch.Tensor:
    largest, places = region(lambda h: m.a(h).max(-1), m.a(x))
    return largest[:, None] + places[:, None] * m.b(x)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "body", [unused, partly_detached, written_later, with_gradients_inside, integers], ids=lambda f: f.__name__
)
def test_either_variant_equals_eager(body, reentrant):
    region = functools.partial(checkpoint, use_reentrant=reentrant)
    model, eager = built(lambda: Functional(lambda m, x: body(m, x, region)))
    x = torch.randn(6, 4)
    assert torch.equal(compiled(model, x, 2).step(x), accumulate(eager, x, 1))
    assert_same(model, eager)
