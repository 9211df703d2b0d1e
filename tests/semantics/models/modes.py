"""Models that read `self.training`, draw random numbers or keep running statistics."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.semantics.case import Body, Case, rows

__all__ = ["CASES"]


class Partly(nn.Module):
    """A frozen BatchNorm stays in evaluation mode when the model is switched."""

    def __init__(self):
        super().__init__()
        self.a, self.frozen, self.live, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def train(self, mode=True):
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x):
        return self.b(self.live(self.frozen(self.a(x))))


class Depth(nn.Module):
    """Stochastic depth as it is written by hand."""

    def __init__(self, rate=0.5):
        super().__init__()
        self.rate, self.a, self.b = rate, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.a(x)
        if self.training and self.rate:
            keep = h.new_empty(h.shape[0], 1).bernoulli_(1 - self.rate)
            h = h * keep.div_(1 - self.rate)
        return self.b(x + h)


class OnlyInEval(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.a(x)
        return self.b(h) if self.training else (self.b(h).softmax(-1), h.argmax(-1))


class Instance(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 4, 1), nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
        self.last = nn.Conv1d(4, 2, 1)

    def forward(self, x):
        return self.last(self.norm(self.conv(x)))


class Ours(nn.Module):
    """Running statistics, by hand: a counter, a mean replaced and a variance written in place."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x):
        h = self.a(x)
        if self.training:
            with torch.no_grad():
                self.seen += 1
                rate = 1.0 / self.seen.float()
                self.mean = (1 - rate) * self.mean + rate * h.mean(0)
                self.variance.lerp_(h.var(0, unbiased=False), rate)
        return self.b((h - self.mean) / (self.variance + 1e-5).sqrt())


def seeded(m, x):
    h = m.a(x)
    torch.manual_seed(3)
    return m.b(h + torch.rand(4))


def own_generator(m, x):
    return m.b(m.a(x) + torch.rand(4, generator=m.generator))


def with_generator():
    model = Body(own_generator)
    model.generator = torch.Generator().manual_seed(5)
    return model


def kept_seed(m, x):
    h = m.a(x)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        h = h + torch.randn(4)
    return m.b(h) + torch.rand_like(x)


def functional_dropouts(m, x):
    h = F.dropout(m.a(x), 0.3, m.training)
    h = F.feature_dropout(h[:, :, None], 0.3, training=m.training)[:, :, 0] if hasattr(F, "feature_dropout") else h
    return F.rrelu(m.b(F.alpha_dropout(h, 0.2, training=m.training)), training=m.training)


def norm(**options):
    return lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, **options), nn.ReLU(inplace=True), nn.Linear(4, 4))


def shared_norm():
    bn = nn.BatchNorm1d(4)
    return nn.Sequential(nn.Linear(4, 4), bn, nn.Linear(4, 4), bn, nn.Linear(4, 4))


SIZES = "sizes at least two"

CASES = {
    "nn.Dropout": Case(lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.3))),
    "F.dropout and kin": Case(lambda: Body(functional_dropouts)),
    "stochastic depth": Case(Depth),
    "another output in evaluation": Case(OnlyInEval),
    "a part that stays frozen": Case(Partly),
    "BatchNorm": Case(norm()),
    "BatchNorm, momentum None": Case(norm(momentum=None)),
    "BatchNorm without statistics": Case(norm(track_running_stats=False)),
    "SyncBatchNorm": Case(lambda: nn.SyncBatchNorm.convert_sync_batchnorm(norm()()), modes=(False,)),
    "one BatchNorm, twice": Case(shared_norm),
    "InstanceNorm": Case(Instance, rows(3, 5)),
    "running statistics by hand": Case(Ours, mixes=True),
    "rand": Case(lambda: Body(lambda m, x: m.b(m.a(x) + torch.rand(4)) * torch.rand_like(x))),
    "manual_seed in forward": Case(lambda: Body(seeded)),
    "a generator of its own": Case(with_generator, left=lambda m: m.generator.get_state()),
    "fork_rng": Case(lambda: Body(kept_seed)),
}
