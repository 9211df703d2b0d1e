"""One small model in three kinds, its batches, and what eager makes of them; layers are named as torchtitan names them."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import nn
from torch.nn.functional import cross_entropy

WORDS, WIDTH, LENGTH, SAMPLES, PARTS = 32, 16, 4, 16, 4

TIMEOUT = timedelta(seconds=60)
"""What every peer is given as the timeout of its process groups."""


class NotAsked(Exception):
    """This peer has no such thing, or it was not tried."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    """Words (batch, length) to logits (batch, length, words): `plain`, `skip` from the first layer to the last, or `tied`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        if kind == "tied":
            self.lm_head.weight = self.tok_embeddings.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        first = x = self.tok_embeddings(words)
        for layer in self.layers:
            x = layer(x)
        if self.kind == "skip":
            x = x * first
        return self.lm_head(self.norm(x))


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean over labels that are not -100."""
    return cross_entropy(logits.flatten(0, 1), target.flatten())


def batch(samples: int = SAMPLES, *, seed: int = 1, ignored: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return words and labels (samples, LENGTH); with `ignored`, labels of the first samples do not count."""
    generator = torch.Generator().manual_seed(seed)
    words, labels = torch.randint(0, WORDS, (2, samples, LENGTH), generator=generator)
    if ignored:
        labels[: samples // 4, 1:] = -100
    return words, labels


def eager_gradients(kind: str, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    model = Net(kind)
    loss_of(model(x), y).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def compared(gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> str:
    """Say whether these gradients, of a part of the model, are those of eager, or which is farthest."""
    worst, where = 0.0, ""
    for name, gradient in gradients.items():
        wanted = expected.get(name, expected["tok_embeddings.weight"])  # tied, by its other name
        off = float((gradient - wanted).norm() / wanted.norm())
        if not off <= worst:
            worst, where = off, name
    if not gradients:
        return "no gradients"
    return "equal to eager" if worst < 1e-4 else f"other gradients than eager: {where} is off by {worst:.0%}"
