"""Models that switch grad mode or autocast inside `forward`, or are called with a mode switched."""

from __future__ import annotations

import torch

from tests.semantics.case import Body, Case

__all__ = ["CASES"]


def no_grad(m, x):
    h = m.a(x)
    with torch.no_grad():
        k = m.b(h).softmax(-1) * 2
    return m.c(h * k)


def enable_inside_no_grad(m, x):
    with torch.no_grad():
        h = m.a(x)
        with torch.enable_grad():
            k = m.b(h) * 2
        j = m.c(h) + 1
    return k * j + m.c(x)


def force_gradient(m, x):
    with torch.enable_grad():
        h = x.detach().requires_grad_()
        energy = (m.a(h).tanh() ** 2).sum()
        (force,) = torch.autograd.grad(energy, h, create_graph=m.training)
    return m.b(force)


@torch.no_grad()
def _target(m, x):
    return m.b(x).relu()


@torch.enable_grad()
def _live(m, x):
    return m.c(x)


def decorated(m, x):
    return m.a(_live(m, x)) + _target(m, m.a(x))


def set_grad_enabled(m, x):
    torch.set_grad_enabled(False)
    h = m.a(x)
    torch.set_grad_enabled(True)
    return m.b(x) * h


def inference(m, x):
    with torch.inference_mode():
        scale = torch.arange(4) * 2.0
        k = m.b(x)
    return m.a(x) * scale.clone() + k.clone()


def autocast(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        h = m.b(m.a(x))
        with torch.autocast("cpu", enabled=False):
            h = m.c(h.float()) * 2
        h = h @ m.c.weight
    return h.float()


@torch.autocast("cpu", torch.bfloat16)
def _cast(m, x):
    return m.b(m.a(x))


def autocast_decorated(m, x):
    return m.c(_cast(m, x).float())


def autocast_nested_dtype(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        h = m.a(x)
        with torch.autocast("cpu", torch.float16):
            h = m.b(h)
        k = m.c(h)
    return k.float()


def autocast_and_no_grad(m, x):
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        h = m.a(x)
    with torch.no_grad():
        k = m.b(x)
        with torch.autocast("cpu", torch.bfloat16):
            k = m.c(k)
    with torch.autocast("cpu", torch.bfloat16):
        j = m.c(x)
    return m.b(h.float()) + k.float() + j.float()


def never_enabled(m, x):
    with torch.autocast("cpu", enabled=False):
        h = m.a(x)
    return m.b(h)


def asks_for_the_mode(m, x):
    h = m.a(x)
    if torch.is_grad_enabled():
        h = h * 2
    if torch.is_autocast_enabled("cpu"):
        h = h + 1
    return m.b(h).float()


def detached(m, x):
    h = m.a(x)
    return m.b(h.detach()) + m.c(h).data * 2 + h


CASES = {
    "no_grad": Case(lambda: Body(no_grad)),
    "no_grad around": Case(lambda: Body(no_grad), around=torch.no_grad),
    "enable_grad in no_grad": Case(lambda: Body(enable_inside_no_grad)),
    "enable_grad in no_grad, under no_grad": Case(lambda: Body(enable_inside_no_grad), around=torch.no_grad),
    "a force under no_grad": Case(lambda: Body(force_gradient), around=torch.no_grad),
    "a force": Case(lambda: Body(force_gradient)),
    "decorators": Case(lambda: Body(decorated)),
    "decorators under no_grad": Case(lambda: Body(decorated), around=torch.no_grad),
    "set_grad_enabled": Case(lambda: Body(set_grad_enabled)),
    "inference_mode": Case(lambda: Body(inference)),
    "inference_mode around": Case(lambda: Body(no_grad), around=torch.inference_mode),
    "autocast": Case(lambda: Body(autocast)),
    "autocast decorator": Case(lambda: Body(autocast_decorated)),
    "autocast of two dtypes": Case(lambda: Body(autocast_nested_dtype)),
    "autocast and no_grad": Case(lambda: Body(autocast_and_no_grad)),
    "autocast around": Case(
        lambda: Body(autocast), tolerance=5e-2, around=lambda: torch.autocast("cpu", torch.bfloat16)
    ),
    "autocast disabled inside": Case(
        lambda: Body(never_enabled), tolerance=5e-2, around=lambda: torch.autocast("cpu", torch.bfloat16)
    ),
    "autocast disabled": Case(lambda: Body(never_enabled)),
    "asks for the grad mode": Case(lambda: Body(asks_for_the_mode)),
    "asks for the grad mode, no_grad": Case(lambda: Body(asks_for_the_mode), around=torch.no_grad),
    "asks for autocast": Case(
        lambda: Body(asks_for_the_mode), tolerance=5e-2, around=lambda: torch.autocast("cpu", torch.bfloat16)
    ),
    "detach and data": Case(lambda: Body(detached)),
}
