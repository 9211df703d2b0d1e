"""The yardstick: a plain micro-batched loop over the model itself, as everybody writes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

__all__ = ["accumulate", "assert_same", "looped", "off", "square_loss"]


def square_loss(output: Any) -> torch.Tensor:
    """A mean over the samples of any output structure, every leaf taking part."""
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return torch.stack([leaf.square().mean() for leaf in leaves]).sum()


def accumulate(
    model: nn.Module,
    x: torch.Tensor,
    count: int,
    loss_fn: Callable[..., torch.Tensor] = square_loss,
    target: Any = None,
) -> torch.Tensor:
    """Forward and backward of `count` micro-batches; returns the loss of the whole mini-batch."""
    total = None
    targets = [()] * count if target is None else [(part,) for part in torch.tensor_split(target, count)]
    for part, wanted in zip(torch.tensor_split(x, count), targets, strict=True):
        loss = loss_fn(model(part), *wanted) * (len(part) / len(x))
        loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None
    return total


def looped(
    model: nn.Module, inputs: dict[str, torch.Tensor], count: int, loss_fn: Callable[..., torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The gradients that a loop over `count` micro-batches leaves, as "name.grad"."""
    samples = len(next(iter(inputs.values())))
    for parts in zip(*(value.tensor_split(count) for value in inputs.values()), strict=True):
        share = len(parts[0]) / samples
        (loss_fn(model(**dict(zip(inputs, parts, strict=True)))) * share).backward()
    return {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}


def off(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> float:
    """How far the worst tensor is from what is expected, in parts of its size."""
    return max(float((found[name] - g).abs().max() / g.abs().max().clamp(min=1e-6)) for name, g in expected.items())


def assert_same(model: nn.Module, reference: nn.Module, tolerance: float = 0.0) -> None:
    """Gradients within `tolerance` of their size (0: bit-equal), buffers bit-equal, and the same state_dict keys."""
    assert list(model.state_dict()) == list(reference.state_dict())
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None and theirs.grad is not None:
            allowed = tolerance * float(theirs.grad.abs().max())
            worst = float((mine.grad - theirs.grad).abs().max())
            assert worst <= allowed, f"gradient of {name} differs by {worst}, allowed {allowed}"
    for (name, mine_buffer), their_buffer in zip(model.named_buffers(), reference.buffers(), strict=True):
        assert torch.equal(mine_buffer, their_buffer), name
