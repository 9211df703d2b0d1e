"""Models that keep something on themselves between calls."""

from __future__ import annotations

from collections import deque

import torch
import torch.nn.functional as F
from torch import nn

from tests.semantics.case import Case

__all__ = ["CASES"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.start()

    def start(self):
        pass


class Shows(Net):
    """Keeps an activation for other code to read."""

    def start(self):
        self.latest, self.found = None, {}

    def forward(self, x):
        h = self.latest = self.a(x)
        self.found["b"] = k = self.b(h).relu()
        return self.c(k)


class Collects(Net):
    def start(self):
        self.seen, self.recent = [], deque(maxlen=2)

    def forward(self, x):
        h = self.a(x)
        self.seen.append(h.detach())
        self.recent.append(h.detach().mean())
        return self.c(self.b(h))


class Fills(Net):
    """Puts its activations where others were."""

    def start(self):
        self.heads, self.counts = [None, torch.zeros(1)], [0, 0]

    def forward(self, x):
        h = self.heads[0] = self.a(x)
        self.heads[1] = k = self.b(h).relu()
        self.counts[1] += 2
        return self.c(k)


class Slides(Net):
    """Keeps the last three only."""

    def start(self):
        self.recent = []

    def forward(self, x):
        h = self.a(x)
        self.recent.append(h.detach())
        if len(self.recent) > 3:
            self.recent.pop(0)
        return self.c(self.b(h))


class Files(Net):
    """A new key for every call."""

    def start(self):
        self.calls, self.found = 0, {}

    def forward(self, x):
        h = self.a(x)
        self.found[self.calls] = h.detach()
        self.calls += 1
        return self.c(self.b(h))


class Counts(Net):
    def start(self):
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.c(self.b(self.a(x)))


class CountsInside(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4), Counts(), nn.Linear(4, 4))


class Warms(Net):
    """Computes with its counter of calls."""

    def start(self):
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.c(self.b(self.a(x)) * min(1.0, self.calls / 10))


class WarmsInside(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4), Warms(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


class First(Net):
    """Computes something else in its first call."""

    def start(self):
        self.ready = False

    def forward(self, x):
        h = self.a(x)
        if not self.ready:
            self.ready = True
            h = h * 2
        return self.c(self.b(h))


class Remembers(Net):
    """Computes with what the last call left."""

    def start(self):
        self.last = torch.zeros(4)

    def forward(self, x):
        h = self.a(x) + self.last
        self.last = h.detach().mean(0)
        return self.c(self.b(h))


class RemembersInside(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4), Remembers(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


class Cached(Net):
    """A table that is made in the first call and kept: the same in every call."""

    def start(self):
        self.table, self.tables = None, {}

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(4.0).cos()
        if x.shape[-1] not in self.tables:
            self.tables[x.shape[-1]] = torch.linspace(0, 1, x.shape[-1])
        return self.c(self.b(self.a(x) * self.table + self.tables[x.shape[-1]]))


class Normalised(Net):
    """Data-dependent initialisation, as in ActNorm: the first micro-batch decides the parameters for all calls."""

    def start(self):
        self.scale = None

    def forward(self, x):
        h = self.a(x)
        if self.scale is None:
            self.scale = 1 / h.detach().std()
        return self.c(self.b(h * self.scale))


class Counted(Net):
    def start(self):
        self.register_buffer("num_batches", torch.tensor(0))

    def forward(self, x):
        self.num_batches.add_(1)
        return self.c(self.b(self.a(x)) / self.num_batches.clone())


class Queue(Net):
    """A queue of keys, its pointer a buffer, as in MoCo."""

    def start(self):
        self.register_buffer("queue", torch.zeros(6, 4))
        self.register_buffer("pointer", torch.tensor(0))

    @torch.no_grad()
    def push(self, keys):
        self.queue[(self.pointer + torch.arange(2)) % 6] = keys
        self.pointer.copy_((self.pointer + 2) % 6)

    def forward(self, x):
        keys = self.a(x)
        out = self.b(keys) @ self.queue.clone().T
        self.push(keys.detach()[:2])
        return out + self.c(x).mean(-1, keepdim=True)


class Momentum(Net):
    """A second encoder follows the first by moving average, in `forward`."""

    def start(self):
        self.slow = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for mine, theirs in zip(self.slow.parameters(), self.a.parameters(), strict=True):
                mine.mul_(0.9).add_(theirs, alpha=0.1)
            k = self.slow(x)
        return self.c(self.b(self.a(x)) * k)


class Observed(Net):
    """Fake quantisation with an observer."""

    def start(self):
        self.register_buffer("low", torch.tensor(0.0))
        self.register_buffer("high", torch.tensor(0.0))

    def forward(self, x):
        h = self.a(x)
        if self.training:
            self.low.copy_(torch.minimum(self.low, h.detach().min()))
            self.high = torch.maximum(self.high, h.detach().max())
        scale = (self.high - self.low).clamp(min=1e-3) / 255
        h = torch.fake_quantize_per_tensor_affine(h, scale, torch.zeros(1, dtype=torch.int32), 0, 255)
        return self.c(self.b(h))


class Prepared(nn.Module):
    def __init__(self):
        super().__init__()
        from torch.ao.quantization import default_fake_quant

        self.a, self.fake, self.b = nn.Linear(4, 4), default_fake_quant(), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(self.fake(self.a(x)).relu())


class Renormalised(nn.Module):
    """`max_norm` makes an embedding write its own weight in `forward`."""

    def __init__(self):
        super().__init__()
        self.table, self.b = nn.Embedding(8, 4, max_norm=1.0), nn.Linear(4, 4)
        self.free = nn.Parameter(torch.randn(8, 4) * 3, requires_grad=False)

    def forward(self, x):
        return self.b(self.table(x)) + F.embedding(x, self.free, max_norm=0.5)


class Globally(Net):
    """Keeps its state in a list that is not on the model."""

    def start(self):
        self.kept = LIST

    def forward(self, x):
        LIST.append(x.shape[-1])
        return self.c(self.b(self.a(x)))


LIST: list = []

CASES = {
    "keeps an activation": Case(Shows, left=lambda m: [m.latest, dict(m.found)]),
    "collects activations": Case(Collects, left=lambda m: [list(m.seen), list(m.recent)], merged=True),
    "puts activations into a list": Case(Fills, left=lambda m: [list(m.heads), list(m.counts)]),
    "keeps the last activations": Case(Slides, left=lambda m: list(m.recent), refused="recent"),
    "files activations by call": Case(Files, left=lambda m: dict(m.found), refused="found"),
    "counts its calls": Case(Counts, left=lambda m: m.calls),
    "a submodule counts its calls": Case(CountsInside, left=lambda m: m[1].calls),
    "its counter matters": Case(Warms, left=lambda m: m.calls, refused="calls"),
    "the counter of a submodule matters": Case(WarmsInside, left=lambda m: m[1].calls),
    "another first call": Case(First, left=lambda m: m.ready, refused="ready"),
    "remembers the last call": Case(Remembers, left=lambda m: m.last, refused="last"),
    "a submodule remembers the last call": Case(RemembersInside, left=lambda m: m[1].last),
    "a table that is kept": Case(Cached),
    "initialised by the first data": Case(Normalised, left=lambda m: m.scale, refused="scale"),
    "a counter buffer": Case(Counted),
    "a queue of keys": Case(Queue),
    "a momentum encoder": Case(Momentum, left=lambda m: list(m.slow.parameters())),
    "an observer in a submodule": Case(lambda: nn.Sequential(nn.Linear(4, 4), Observed(), nn.Linear(4, 4))),
    "torch's fake quantisation": Case(Prepared),
    "max_norm": Case(
        Renormalised,
        lambda size: ((torch.arange(size * 3) * 5 % 8).reshape(size, 3),),
        left=lambda m: list(m.parameters()),
    ),
}
