"""Causal decoders, a loss over tokens, and the plain loop over whole micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS = 20, 16, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1))
        attention = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.behind(x))))


class Decoder(nn.Module):
    """A decoder with learned positions; `tied`: its head is its embedding."""

    def __init__(self, n_blocks: int = 2, *, tied: bool = False, longest: int = 32) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(longest, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(n_blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Between(nn.Module):
    """Embedding and head with a function of the user's between them."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.function(self, self.embed(tokens)))


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def tokens_and_labels(samples: int = 4, length: int = 16, *, ignored: bool = False) -> tuple[Tensor, Tensor]:
    tokens, labels = torch.randint(VOCABULARY, (2, samples, length)).unbind()
    if ignored:
        labels[0, 2:7] = labels[1, :4] = labels[-1] = -100
    return tokens, labels


def plain_step(model: nn.Module, tokens: Tensor, labels: Tensor, count: int, loss_fn: Any = token_loss) -> float:
    """Return the loss of the loop over micro-batches, weighted by the labels that count. Gradients are added."""
    total, loss = (labels != -100).sum().double(), 0.0
    for part, target in zip(tokens.chunk(count), labels.chunk(count), strict=True):
        weight = (target != -100).sum().double() / total
        if weight:
            share = loss_fn(model(part), target) * weight
            share.backward()
            loss += share.item()
    return loss


def difference(model: nn.Module, other: nn.Module) -> float:
    """Return the largest difference of parameters and gradients, relative to the largest element."""
    pairs = [(own.detach(), twin.detach()) for own, twin in zip(model.parameters(), other.parameters(), strict=True)]
    pairs += [(own.grad, twin.grad) for own, twin in zip(model.parameters(), other.parameters(), strict=True)]
    return max(float((own - twin).abs().max() / twin.abs().max().clamp(min=1e-12)) for own, twin in pairs)
