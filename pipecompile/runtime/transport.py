"""How a value gets from one device to another: the thing itself where they share memory, else a copy.

    0F0 ──► SEND: copied here, between two GPUs ──► RECV: copied here, between CPU and GPU ──► 1F0

When and on which stream a copy runs is told by `launches.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Link", "link"]


class Link:
    """Between two places that share memory: hand the value over. Also the base of the links that copy."""

    def send(self, value: Any) -> Any:
        return value

    def receive(self, parcel: Any) -> Any:
        return parcel


class BlockingCopy(Link):
    """Between CPU and GPU: a plain copy in the receiver's order."""

    def __init__(self, target: torch.device) -> None:
        self.target = target

    def receive(self, parcel: Any) -> Any:
        return None if parcel is None else _alike(parcel, lambda value: value.to(self.target))


class PeerCopy(Link):
    """Between two GPUs: a copy on whatever streams are current, made by the sender."""

    def __init__(self, target: torch.device) -> None:
        self.target = target

    def send(self, value: Any) -> Any:
        return None if value is None else _alike(value, lambda tensor: tensor.to(self.target, non_blocking=True))


def _alike(value: torch.Tensor, copy: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A copy that is a leaf and wants a gradient exactly when the original does."""
    return copy(value.detach()).requires_grad_(value.requires_grad)


def link(source: torch.device, target: torch.device) -> Link:
    """The link from one device to another."""
    if source == target:
        return Link()
    both = source.type == target.type == "cuda"
    return PeerCopy(target) if both else BlockingCopy(target)
