"""Values that cross a cut: integers, values without gradients, values used in many stages, shared inputs and parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.semantics.case import Body, Case, Pair

__all__ = ["CASES"]


def two_inputs(size):
    return torch.randn(size, 4, generator=torch.Generator().manual_seed(size)), torch.arange(size) % 4


def integers(m, x):
    h = m.a(x)
    order, positive = h.argsort(-1), h > 0
    return m.b(h).gather(-1, order) * positive + m.c(h).masked_fill(~positive, 0.0) + order


def three_uses(m, x):
    h = m.a(x)
    return m.c(m.b(h) * h) + h.sin()


def as_it_is(m, x, k):
    return x, m.c(m.b(m.a(x))), k


def unused_input(m, x, k):
    return m.c(m.b(m.a(x)))


def unused_parameters(m, x):
    return m.c(m.a(x))


def unused_result(m, x):
    h = m.a(x)
    m.b(h).sum()
    return m.c(h)


def same_output(m, x):
    h = m.b(m.a(x))
    return h, h, {"h": h, "c": m.c(h)}


def parameter_twice(m, x):
    return F.linear(m.b(m.a(x)), m.a.weight) + m.c(x)


def module_twice(m, x):
    return m.a(m.b(m.a(x).relu()).relu())


def shared():
    model = Body(lambda m, x: m.c(m.b(m.a(x).relu()).relu()))
    model.c.weight = model.a.weight
    return model


def mixed():
    model = Body(lambda m, x: m.c(m.b(m.a(x.bfloat16()).relu()).float()))
    model.a.bfloat16(), model.b.bfloat16()
    return model


def frozen(*names):
    def build():
        model = Body(lambda m, x: m.c(m.b(m.a(x).relu()).relu()))
        for name in names:
            getattr(model, name).requires_grad_(False)
        return model

    return build


class LoRA(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x)) * 0.5


def adapted():
    return nn.Sequential(
        nn.Linear(4, 4).requires_grad_(False),
        nn.Tanh(),
        LoRA(),
        nn.Tanh(),
        LoRA(),
        nn.Linear(4, 4).requires_grad_(False),
    )


def item(m, x):
    h = m.a(x)
    return m.b(h) * float(h.mean())


def branch(m, x):
    h = m.a(x)
    return m.b(h) if h.sum() > 0 else m.c(h)


def nan_check(m, x):
    h = m.a(x)
    if torch.isnan(h).any():
        raise ValueError("not a number")
    return m.b(h)


def nonzero(m, x):
    h = m.a(x)
    return m.b(h)[h[:, 0] > 0].sum() + m.c(x)


def tolist(m, x):
    h = m.a(x)
    return m.b(h) * h.detach().mean().tolist()


def numpy(m, x):
    h = m.a(x)
    return m.b(h) * torch.from_numpy(h.detach().numpy()).mean()


def printed(m, x):
    h = m.a(x)
    return m.b(h) * len(f"{h.detach().mean():.3f}")


def is_tensor(m, x):
    h = m.a(x)
    assert isinstance(h, torch.Tensor)
    assert torch.is_tensor(h)
    assert not isinstance(h, nn.Parameter)
    assert isinstance(m.a.weight, nn.Parameter)
    assert type(h) is torch.Tensor or issubclass(type(h), torch.Tensor)
    return m.b(h)


def asks_requires_grad(m, x):
    h = m.a(x)
    return m.b(h) * (2.0 if h.requires_grad else 3.0) * (2.0 if x.requires_grad else 3.0)


def allclose(m, x):
    h = m.a(x)
    return m.b(h) if torch.allclose(h, h * 2) else m.c(h)


def no_gradient_at_all():
    return Body(lambda m, x: m.c(m.b(m.a(x)))).requires_grad_(False)


def constant_output(m, x):
    return m.c(m.b(m.a(x))), torch.ones(x.shape[0], 2), 3, "three", None


class Compiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (
            nn.Linear(4, 4),
            torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), backend="eager"),
        )
        self.c = torch.compile(nn.Linear(4, 4), backend="eager")

    def forward(self, x):
        return self.c(self.b(self.a(x)))


class CompiledMethod(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    @torch.compile(backend="eager")
    def forward(self, x):
        return self.c(self.b(self.a(x)).relu())


def compiled_in_place():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4))
    model[1].compile(backend="eager")
    return model


NEEDS = "PC10[123]|PC199"

CASES = {
    "integers and booleans across cuts": Case(lambda: Body(integers)),
    "a value used by three stages": Case(lambda: Body(three_uses)),
    "an output that is an input": Case(lambda: Pair(as_it_is), two_inputs),
    "an unused input": Case(lambda: Pair(unused_input), two_inputs),
    "unused parameters": Case(lambda: Body(unused_parameters)),
    "an unused result": Case(lambda: Body(unused_result)),
    "one output many times": Case(lambda: Body(same_output)),
    "outputs that are constants": Case(lambda: Body(constant_output)),
    "a parameter used twice": Case(lambda: Body(parameter_twice)),
    "a module used twice": Case(lambda: Body(module_twice)),
    "a weight shared by assignment": Case(shared),
    "bfloat16 body, float32 head": Case(mixed, tolerance=2e-2),
    "frozen first": Case(frozen("a")),
    "frozen in the middle": Case(frozen("b")),
    "frozen last": Case(frozen("b", "c")),
    "all but the last frozen": Case(frozen("a", "b")),
    "LoRA": Case(adapted),
    "nothing to train": Case(no_gradient_at_all),
    "isinstance": Case(lambda: Body(is_tensor)),
    "asks requires_grad": Case(lambda: Body(asks_requires_grad)),
    "float(x.mean())": Case(lambda: Body(item), mixes=True),
    "if x.sum() > 0": Case(lambda: Body(branch), mixes=True),
    "a check for nan": Case(lambda: Body(nan_check)),
    "a mask of values": Case(lambda: Body(nonzero), mixes=True),
    "tolist": Case(lambda: Body(tolist), mixes=True),
    "numpy": Case(lambda: Body(numpy), mixes=True),
    "a formatted value": Case(lambda: Body(printed), refused=NEEDS),
    "allclose": Case(lambda: Body(allclose), mixes=True),
    "a compiled submodule": Case(Compiled),
    "a compiled forward": Case(CompiledMethod),
    "module.compile()": Case(compiled_in_place),
    "a compiled model": Case(lambda: torch.compile(Body(module_twice), backend="eager")),
}
