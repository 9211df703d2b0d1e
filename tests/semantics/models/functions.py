"""Custom autograd functions, gradients taken or changed inside `forward`, checkpoints."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.semantics.case import Body, Case, rows

__all__ = ["CASES"]

Function = torch.autograd.Function


class Round(Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Two(Function):
    """Two outputs, one of them integer, an argument that is not a tensor, and gradients that differ from those of its forward."""

    @staticmethod
    def forward(ctx, x, scale, *, _unused=None):
        order = x.argsort(-1)
        ctx.save_for_backward(x)
        ctx.scale = scale
        ctx.mark_non_differentiable(order)
        return x * scale, order, x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, first, _order, second):
        (x,) = ctx.saved_tensors
        return first * ctx.scale * 77 + second * x, None


class Setup(Function):
    @staticmethod
    def forward(x, weight):
        return x @ weight

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.T * 3, x.T @ gradient * 5


class Reverse(Function):
    """Gradient reversal, with a view as forward."""

    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.strength * gradient, None


class InPlace(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 11


class Sometimes(Function):
    """Reads which inputs need a gradient."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
        return x * weight * (2 if ctx.needs_input_grad[1] else 3)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight if weight is not None else None, (gradient * x).sum(0) if x is not None else None


def two(m, x):
    scaled, order, waves = Two.apply(m.a(x), 2)
    return m.b(scaled).gather(-1, order) + m.c(waves)


def in_place(m, x):
    h = m.a(x)
    k = InPlace.apply(h)
    return m.b(h + k)


def straight_through(m, x):
    h = m.a(x)
    hard = F.one_hot(h.argmax(-1), 4).float()
    return m.b(hard + h - h.detach())


def hooked_value(m, x):
    h = m.a(x)
    h.register_hook(lambda gradient: gradient * 3)
    return m.b(h) + m.c(h)


def retained(m, x):
    h = m.a(x)
    if h.requires_grad:
        h.retain_grad()
    return m.b(h)


def reads_gradient(m, x):
    h = m.a(x)
    return m.b(h) * (1.0 if m.a.weight.grad is None else 2.0)


def penalty(m, x):
    if not torch.is_grad_enabled():
        return m.a(x)
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(m.b(m.a(x).tanh()).sum(), x, create_graph=True)
    return m.c(x) + slope


def own_backward(m, x):
    with torch.enable_grad():
        h = x.detach().requires_grad_()
        m.a(h).pow(2).sum().backward(inputs=[h])
    return m.b(h.grad)


def checkpointed(m, x, reentrant):
    def block(h):
        return F.dropout(m.b(h).relu(), 0.5, m.training)

    return m.c(checkpoint(block, m.a(x), use_reentrant=reentrant))


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])

    def forward(self, x):
        return checkpoint_sequential(self.blocks, 2, self.first(x), use_reentrant=False)


CASES = {
    "straight-through function": Case(lambda: Body(lambda m, x: m.b(Round.apply(m.a(x) * 3)))),
    "several outputs, not all differentiable": Case(lambda: Body(two)),
    "setup_context": Case(lambda: Body(lambda m, x: m.b(Setup.apply(m.a(x), m.c.weight)))),
    "gradient reversal": Case(lambda: Body(lambda m, x: m.b(Reverse.apply(m.a(x), 0.5)) + m.c(x))),
    "function in place": Case(lambda: Body(in_place)),
    "needs_input_grad": Case(
        lambda: Body(lambda m, x: m.b(Sometimes.apply(m.a(x), m.c.bias)) + Sometimes.apply(x, m.c.bias))
    ),
    "straight-through by detach": Case(lambda: Body(straight_through)),
    "tensor hook": Case(lambda: Body(hooked_value), modes=(True, True, False)),
    "retain_grad": Case(lambda: Body(retained)),
    "reads a gradient": Case(lambda: Body(reads_gradient), refused="reads a gradient"),
    "gradient penalty": Case(lambda: Body(penalty)),
    "backward in forward": Case(lambda: Body(own_backward), refused="runs a backward"),
    "checkpoint": Case(lambda: Body(lambda m, x: checkpointed(m, x, False))),
    "reentrant checkpoint": Case(lambda: Body(lambda m, x: checkpointed(m, x, True))),
    "checkpoint_sequential": Case(Deep),
    "input that requires grad": Case(lambda: Body(lambda m, x: m.b(m.a(x).relu()) * x), rows(requires_grad=True)),
}
