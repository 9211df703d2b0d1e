"""Forwards as research code writes them, each with something that recorders stumble over."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from bodies import rows
from torch import nn


class Windows(nn.Module):
    """Shifted windows: the batch is folded into the windows, and found again by a division of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x):
        batch, height, width, channels = x.shape
        cut = torch.roll(x, (-1, -1), (1, 2)).view(batch, height // 2, 2, width // 2, 2, channels)
        windows = cut.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, 4, channels)
        q, k, v = self.qkv(windows).reshape(windows.shape[0], 4, 3, channels).permute(2, 0, 1, 3).unbind(0)
        made = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        again = int(made.shape[0] / (height * width / 2 / 2))
        back = made.view(again, height // 2, width // 2, 2, 2, -1).permute(0, 1, 3, 2, 4, 5)
        return x + torch.roll(back.reshape(again, height, width, -1), (1, 1), (1, 2))


class Experts(nn.Module):
    """Routing by one-hot masks with a capacity, and a loss on the side."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.weight = nn.Linear(4, 3), nn.Parameter(torch.randn(3, 4, 4) * 0.1)

    def forward(self, x):
        p = self.gate(x).softmax(-1)
        chosen = F.one_hot(p.argmax(-1), num_classes=3).to(x.dtype)
        capacity = math.ceil(x.shape[1] * 1.25 / 3)
        place = (chosen.cumsum(1) - 1) * chosen
        kept = (place < capacity).to(x.dtype) * chosen
        sent = kept.unsqueeze(-1) * F.one_hot(place.long().clamp(0, capacity - 1), capacity)
        made = torch.einsum("ebcd,edh->ebch", torch.einsum("bsec,bsd->ebcd", sent, x), self.weight).relu()
        aside = (p.mean((0, 1)) * chosen.mean((0, 1))).sum() * 3
        return torch.einsum("bsec,ebcd->bsd", sent * p.unsqueeze(-1), made), aside


class Graph(nn.Module):
    """Messages along edges, gathered with index_add and scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Linear(8, 4)

    def forward(self, x):
        batch, nodes, width = x.shape
        start = torch.arange(batch, device=x.device)[:, None] * nodes
        source = (torch.arange(nodes) + start).flatten()
        target = ((torch.arange(nodes) * 2 + 1) % nodes + start).flatten()
        h = x.reshape(batch * nodes, width)
        sent = self.message(torch.cat([h[source], h[target]], -1)).relu()
        degree = (
            torch.zeros(batch * nodes).scatter_add_(0, target, torch.ones_like(target, dtype=h.dtype)).clamp_(min=1)
        )
        h = h + torch.zeros_like(h).index_add_(0, target, sent) / degree.unsqueeze(-1)
        h = h.scatter_reduce(0, target[:, None].expand(-1, width), sent, "amax", include_self=True)
        return h.view(batch, nodes, width).mean(1)


class Scan(nn.Module):
    """A state-space model, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.project, self.step = nn.Parameter(torch.rand(4, 2)), nn.Linear(4, 5), nn.Linear(1, 4)

    def forward(self, u):
        batch, length, width = u.shape
        step, b, c = self.project(u).split([1, 2, 2], dim=-1)
        step = F.softplus(self.step(step))
        decay = torch.exp(torch.einsum("bld,dn->bldn", step, -torch.exp(self.rate)))
        driven = torch.einsum("bld,bln,bld->bldn", step, b, u)
        h, made = torch.zeros(batch, width, 2, device=u.device), []
        for i in range(length):
            h = decay[:, i] * h + driven[:, i]
            made.append(torch.einsum("bdn,bn->bd", h, c[:, i]))
        return torch.stack(made, dim=1)


class Codebook(nn.Module):
    """Vector quantisation: straight-through gradients, and moving averages written without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.codes, self.a = nn.Embedding(6, 4), nn.Linear(4, 4)
        self.register_buffer("size", torch.zeros(6))
        self.register_buffer("average", torch.zeros(6, 4))

    def forward(self, x):
        z = self.a(x)
        flat = z.reshape(-1, 4)
        index = torch.cdist(flat, self.codes.weight).argmin(1)
        chosen = F.one_hot(index, 6).type(flat.dtype)
        q = (chosen @ self.codes.weight).view_as(z)
        if self.training:
            with torch.no_grad():
                self.size.data.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                self.average.mul_(0.9).add_(chosen.t() @ flat, alpha=0.1)
        return z + (q - z).detach(), F.mse_loss(q.detach(), z) + F.mse_loss(q, z.detach()), index.view(z.shape[:-1])


class Hidden(nn.Module):
    """A masked autoencoder: random order, kept part, and the order undone."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode, self.token = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.zeros(1, 1, 4))

    def forward(self, x, ratio=0.5):
        n, length, width = x.shape
        kept = int(length * (1 - ratio))
        order = torch.argsort(torch.rand(n, length, device=x.device), dim=1)
        undone = torch.argsort(order, dim=1)
        seen = self.encode(torch.gather(x, 1, order[:, :kept].unsqueeze(-1).repeat(1, 1, width)))
        mask = torch.ones([n, length], device=x.device)
        mask[:, :kept] = 0
        mask = torch.gather(mask, 1, undone)
        full = torch.cat([seen, self.token.repeat(n, length - kept, 1)], 1)
        made = self.decode(torch.gather(full, 1, undone.unsqueeze(-1).repeat(1, 1, width)))
        return (((made - x) ** 2).mean(-1) * mask).sum() / mask.sum(), made


CASES = [(Windows, (4, 4, 4)), (Experts, (5, 4)), (Graph, (5, 4)), (Scan, (4, 4)), (Codebook, (3, 4)), (Hidden, (6, 4))]


@pytest.mark.parametrize(("model", "shape"), CASES)
def test_the_graph_does_what_the_model_does(agrees, model, shape):
    graph = agrees(model(), rows(*shape), sizes=(3, 5))
    assert all(guard.holds(size) for guard in graph.facts.guards for size in (3, 5))
