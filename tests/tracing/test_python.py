"""What Python does with tensors in a forward: the graph does it at another batch size, in outputs and gradients."""

from __future__ import annotations

import functools
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from bodies import Body, rows
from torch import nn
from torch.nn import functional

import pipecompile as pc
from pipecompile import TraceError
from pipecompile.tracing import trace


def iterates(m, x):
    made = [m.a(row) for row in x.unbind(1)]
    for i in range(x.size(1)):
        made.append(m.b(x[:, i]))
    for i, row in enumerate(x.transpose(0, 1)):
        made[i] = made[i] + m.c(row)
    first, *rest = made
    return first + sum(rest) + sum(layer(x.mean(1)) for layer in (m.a, m.b))


def shapes(m, x):
    *lead, _, width = x.shape
    assert x.shape == m.a(x).shape
    assert x.shape[1:] in [torch.Size([3, 4])]
    flat = m.a(x).view(math.prod(x.shape)).reshape(x.shape[:1] + torch.Size([2, 6]))
    return flat.view(*lead, -1, width) + len(lead) + x.numel() / x.shape[1:].numel()


def halves(m, x):
    half = x.shape[0] // 2
    left, right = x.split([half, x.shape[0] - half], 0)
    return torch.cat([m.a(left), m.b(x[half:]) + right], 0)


def assigns(m, x):
    h = m.a(x).clone()
    h[:, 0] = 0
    h[x > 0] = 1.0
    h[..., -1] = x[..., 0]
    h[:, :, [0, 2]] += m.b(x)[..., :2]
    h[-1, 1] = 5
    h += 1
    h /= 3
    h @= m.c.weight
    return h


def views(m, x):
    h = m.a(x).clone()
    view = h.view(-1, 2, 2)
    half = view[:, 0]
    half.t()[0].add_(1.0)
    half[:, 1:].mul_(3)
    h.flatten()[::2] *= 2
    return m.b(h) + view.sum((1, 2)).view(x.shape[:2])[..., None]


def factories(m, x):
    n, t = x.shape[:2]
    filled = torch.empty(n, 2, 4)
    for i, layer in enumerate((m.a, m.b)):
        filled[:, i] = layer(x[:, i])
    with torch.device(x.device):
        ones = torch.ones(4)
    mask = torch.full((t, t), float("-inf")).triu(1)[None].expand(n, -1, -1).softmax(-1)
    return (
        mask @ m.c(x) + filled.sum(1, keepdim=True) + ones + x.new_zeros(n, 1, 4) + torch.arange(n)[:, None, None] / n
    )


def several(m, x):
    ordered = x.sort(-1, descending=True)
    top, where = torch.topk(m.a(x), 2, dim=-1)
    parts = torch.split(m.b(x), [1, 3], dim=-1)
    low, high = torch.aminmax(x, dim=-1, keepdim=True)
    return ordered.values + top.sum(-1, True) + where.sum(-1, True) + torch.cat(parts[::-1], -1) + low * high


def einsums(m, x):
    sublists = torch.einsum(x, [0, 1, 2], m.b.weight, [2, 3], [0, 1, 3])
    return torch.einsum("bti,ij->btj", x, m.a.weight) + sublists + torch.einsum("...i,i->...", x, m.mean + 1)[..., None]


def complex_numbers(m, x):
    spectrum = torch.fft.rfft(m.a(x), dim=-1) * (1 + 2j)
    pairs = torch.view_as_complex(m.b(x).view(-1, 2, 2))
    turned = torch.polar(pairs.abs(), pairs.angle()) * pairs.conj()
    return torch.fft.irfft(spectrum, n=4, dim=-1) + torch.view_as_real(turned).reshape(x.shape)


def state(m, x):
    m.mean.add_(x.detach().mean((0, 1)))
    made = m.a(x) - m.mean
    m.mean = m.mean * 0.5
    m.mean[0] = 7
    return made + m.mean


def exchanged(m, x):
    m.mean.data = m.mean * 0.9 + x.detach().mean((0, 1)) * 0.1
    return m.a(x) - m.mean


def attends(m, x):
    mask = torch.ones(3, 3, dtype=torch.bool).tril()
    masked = F.scaled_dot_product_attention(x[:, None], x[:, None], m.b(x)[:, None], attn_mask=mask)
    return m.a(masked[:, 0]) + F.scaled_dot_product_attention(x, x, x, is_causal=True)


def samples(m, x):
    law = torch.distributions.Normal(m.a(x), F.softplus(m.b(x)))
    drawn = law.rsample()
    return law.log_prob(drawn) + torch.rand_like(x) + torch.randn(x.shape[0], 1, 4)


def asks(m, x):
    torch._assert(x.shape[-1] == 4, "four")
    return m.b(x) if torch.compiler.is_compiling() or torch.jit.is_tracing() else m.a(x)


BODIES = [iterates, shapes, halves, assigns, views, factories, several, einsums, complex_numbers, state, exchanged, attends, samples, asks]  # fmt: skip


@pytest.mark.parametrize("body", BODIES)
def test_constructs(agrees, body):
    graph = agrees(Body(body), rows(3, 4), sizes=(3, 5))
    assert all(guard.holds(size) for guard in graph.facts.guards for size in (3, 5))


@pytest.mark.parametrize("body", [iterates, assigns, views, factories, exchanged, several])
def test_constructs_in_stages(body):
    model, twin, (x,) = Body(body), Body(body), rows(3, 4)(5)
    twin.load_state_dict(model.state_dict())
    pipe = pc.compile(model, 2, example_args=rows(3, 4)(4), n_microbatches=1, cost="analytic", partitioner="dp")
    made, expected = pipe(x), twin(x)
    assert torch.equal(made, expected)
    assert torch.equal(model.mean, twin.mean)
    made.square().sum().backward()
    expected.square().sum().backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        assert mine.grad is None or torch.allclose(mine.grad, theirs.grad, rtol=1e-4)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x, scale=1):
        return self.a(x) * scale


class Containers(Base):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.table = nn.ModuleList([nn.Linear(4, 4), nn.ReLU()]), nn.ModuleDict({"k": nn.Linear(4, 4)})
        self.weights, self.named = (
            nn.ParameterList([torch.ones(4)]),
            nn.ParameterDict({"z": nn.Parameter(torch.ones(4))}),
        )
        self.raw, self.cache, self.seen = nn.Parameter(torch.ones(4)), {}, []

    @property
    def scale(self):
        return functional.softplus(self.raw)

    @functools.cached_property
    def line(self):
        return torch.arange(4.0)

    def __getattr__(self, name):
        return super().__getattr__("a" if name == "alias" else name)

    def cached(self, width):
        if width not in self.cache:
            self.cache[width] = torch.arange(width, dtype=torch.float32)
        return self.cache[width]

    def forward(self, x):
        x = super().forward(x, scale=2) + Base.forward(self, x) + self.alias(input=x) + nn.Linear.forward(self.a, x)
        for layer in self.layers[:2]:
            x = layer(x)
        for weight in self.weights:
            x = x * weight
        self.seen.append(x.shape)
        x = self.table["k"](x) + sum(self.named.values()) * len(self.layers)
        return nn.Softmax(-1)(x) * self.scale + self.line + self.cached(x.shape[1]) + self.cached(x.shape[1])


def test_modules_of_all_kinds(agrees):
    model = Containers()
    agrees(model, rows(4))
    assert "line" not in vars(trace(model, *rows(4)(2)))


class Sub(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x, times: int = 2):
        if times > 1:
            x = self.inner(x).relu()
        return x


@pytest.mark.parametrize("make", [torch.jit.script, lambda module: torch.jit.trace(module, torch.randn(2, 4))])
def test_modules_of_torchscript_are_right_and_leave_no_trace(make):
    runs = []
    for record in (False, True):
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = nn.Sequential(nn.Linear(4, 4), make(Sub()), nn.Linear(4, 4))
            graph = trace(model, *rows(4)(4)) if record else model
            made = graph(*rows(4)(4))
        made.sum().backward()
        assert all(type(parameter.data) is torch.Tensor for parameter in model.parameters())
        runs.append([made, *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("training", [True, False])
def test_an_encoder_is_recorded_through_with_a_padding_mask(agrees, training):
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    graph = agrees(
        nn.TransformerEncoder(layer, 2).train(training),
        lambda size: (rows(5, 8)(size)[0], None, torch.arange(5)[None].repeat(size, 1) > 3),
    )
    assert sum("self_attn" in str(node.target) for node in graph.graph.nodes if node.op == "call_module") == 2


@pytest.mark.parametrize(
    "body", [lambda m, x: m.a(x) * x.sum().tolist(), lambda m, x: m.a(x) if x.sum() > 0 else x]
)  # fmt: skip
def test_what_needs_values_is_refused_at_its_line(body):
    with pytest.raises(TraceError) as caught:
        trace(Body(body), torch.randn(3, 4))
    assert "test_python.py" in caught.value.where
