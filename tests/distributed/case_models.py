"""Models and losses of the cases: each function returns a model and its keyword inputs."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from tests.support.models import ZOO, UNet, deterministic
from tests.support.towers import Towers

SAMPLES = 13
FULL = "CASES_FULL" in os.environ

Example = tuple[nn.Module, dict[str, Any]]


def mean_square(output: Any) -> torch.Tensor:
    return (output if isinstance(output, torch.Tensor) else output.logits).square().mean()


def distance(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def resnet18() -> Example:
    make, size = ZOO["resnet18"]
    return deterministic(make()), {"x": torch.randn(SAMPLES, 3, size, size)}


def unet() -> Example:
    return UNet(depth=2 if FULL else 1, width=4), {"x": torch.randn(SAMPLES, 3, 8, 8)}


def gpt2() -> Example:
    config = GPT2Config(
        vocab_size=40, n_positions=16, n_embd=16, n_layer=1 + FULL, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config), {"input_ids": torch.randint(40, (SAMPLES, 8))}


class TiedText(nn.Module):
    """A language model that is recorded in milliseconds: embeddings tied to the head, and residual blocks."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(blocks)
        )
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(self.norm(hidden))


def tied_text() -> Example:
    return TiedText(), {"input_ids": torch.randint(40, (SAMPLES, 8))}


def residual() -> Example:
    """Return a residual network of two blocks with BatchNorm."""
    blocks = [ResidualBlock(4) for _ in range(2)]
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    )
    return Named(model), {"x": torch.randn(SAMPLES, 3, 8, 8)}


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        first, second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.body = nn.Sequential(first, nn.BatchNorm2d(width), nn.ReLU(), second, nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + x)


class Named(nn.Module):
    """A model whose only input is called x."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


def t5() -> Example:
    """Return a T5: encoder, decoder and head share their word embeddings, and the encoder's output goes to every decoder layer."""
    config = T5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_decoder_layers=2, num_heads=2, dropout_rate=0,
        decoder_start_token_id=0, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    inputs = {name: torch.randint(40, (SAMPLES, width)) for name, width in (("input_ids", 8), ("labels", 6))}
    return T5ForConditionalGeneration(config), inputs


class Mixed(nn.Module):
    """A model whose stages exchange integers, a transposed tensor, a tensor without a gradient, and one whose size depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        turned, shifted = self.first(x).t(), index + 1
        constant, chosen = torch.relu(x), x[index > 1]
        y = self.second(turned.t()) + turned.t() * shifted[:, None]
        return self.third(y) * constant.sum() + turned.t() * (shifted % 2)[:, None] + chosen.sum()


def mixed() -> Example:
    return Mixed(), {"x": torch.randn(SAMPLES, 6), "index": torch.arange(SAMPLES) % 4}


class Shift(nn.Module):
    """Adds a buffer, which autograd does not save."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


class Codebook(nn.Module):
    """A statement of the root is kept whole, and writes the rows of a buffer that the data choose."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("rows", torch.randn(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        nearest = torch.cdist(h, self.rows).argmin(1)
        with torch.no_grad():
            for row in nearest.unique().tolist():
                self.rows[row].lerp_(h[nearest == row].mean(0), 0.1)
        return self.third(self.second(h + (self.rows[nearest] - h).detach()).relu())


def codebook() -> Example:
    return Codebook(), {"x": torch.randn(SAMPLES, 6)}


def towers() -> Example:
    """Return two towers and a head of two stages."""
    return Towers(2, depth=2, width=6, head_depth=2), {"x": torch.randn(SAMPLES, 6)}


LANGUAGE, CONVOLUTIONAL = (gpt2, resnet18) if FULL else (tied_text, residual)
"""The models of most cases: with `--full` those of transformers and torchvision, whose recordings take four ranks seconds each."""
