"""What the examples compare with: the plain loop over micro-batches, and how far the gradients of two models are apart.

Also the check of the numbers on their command lines.
"""

import argparse
from collections.abc import Callable

import torch
from torch import nn


def eager_step(
    model: nn.Module, loss_fn: Callable[..., torch.Tensor], x: torch.Tensor, target: torch.Tensor, n_microbatches: int
) -> torch.Tensor:
    """Forward and backward of one micro-batch after the other; returns the loss of the whole mini-batch."""
    total = torch.zeros((), device=x.device)
    for part, wanted in zip(x.tensor_split(n_microbatches), target.tensor_split(n_microbatches), strict=True):
        loss = loss_fn(model(part), wanted) * (len(part) / len(x))
        loss.backward()
        total += loss.detach()
    return total


def gradient_difference(model: nn.Module, other: nn.Module) -> float:
    """The largest absolute difference between two gradients of one parameter; 0 means that all are bit-equal."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((mine.grad.to(theirs.grad.device) - theirs.grad).abs().max()) for mine, theirs in pairs)


def at_least_one(text: str) -> int:
    """The whole number of an option of a script, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)
