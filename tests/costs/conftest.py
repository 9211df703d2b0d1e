"""Small models with the shapes of trouble that the cost models must survive."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from tests.support.model_state import ModelState


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """One thread and a fixed seed: times do not depend on who else is on the machine, values repeat."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def _block(inner: int, outer: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU(inplace=True))


class UNet(nn.Module):
    """Two levels down, two up, with the skips of a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = _block(3, 8), _block(8, 16), _block(16, 16)
        self.up2, self.up1, self.head = _block(32, 8), _block(16, 8), nn.Conv2d(8, 2, 1)
        self.pool, self.drop = nn.MaxPool2d(2), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        one = self.down1(x)
        two = self.down2(self.pool(one))
        low = self.drop(self.bottom(self.pool(two)))
        up = self.up2(torch.cat([F.interpolate(low, scale_factor=2.0), two], 1))
        up = self.up1(torch.cat([F.interpolate(up, scale_factor=2.0), one], 1))
        return {"logits": self.head(up), "low": low}


def blank_first(x: Tensor) -> None:
    """A write by a function, as a tracer records `x[:, 0] = 0`; fx's own tracer cannot."""
    x[:, 0] = 0


fx.wrap("blank_first")


class Zoo(nn.Module):
    """One of each kind of node: in-place writes, tuples, integers, renormed embedding, buffers written by functions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16, max_norm=0.1)
        self.lstm = nn.LSTM(16, 16, batch_first=True, num_layers=2)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm, self.drop, self.linear = nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.position = nn.Parameter(torch.randn(1, 8, 16))
        self.count = nn.Buffer(torch.zeros(()))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        self.count.add_(1)
        x, (hidden, _) = self.lstm(self.embed(tokens) + self.position)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        blank_first(x)
        x += 1
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        x = F.relu(self.frozen(self.drop(self.linear(x))), inplace=True)
        best = x.max(dim=1)
        return x * torch.arange(tokens.size(1), device=tokens.device).view(
            1, -1, 1
        ), hidden + best.values + best.indices


@pytest.fixture
def unet() -> UNet:
    return UNet()


@pytest.fixture
def zoo() -> Zoo:
    return Zoo()


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, 50, (4, 8))


@pytest.fixture
def found() -> type[ModelState]:
    return ModelState
