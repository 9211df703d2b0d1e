"""How a value gets from one device to another: the thing itself within a device, a copy on a stream of its own between GPUs.

    compute stream of 0   ──2F0──■ produced                      the copy waits for the producer, the consumer waits
    copy streams of 0 ► 1        └──► copy ──■ arrived           for the copy, and nobody waits for anybody else
    compute stream of 1                      └──► 3F0 ──

`Tensor.to` between devices synchronises with the current streams of both, so the copy streams are made current on both
sides. The compute stream of a device is whatever stream is current there when the step begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["Link", "link", "to_device"]


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


class StreamCopy(Link):
    """Between two GPUs: a peer copy on copy streams, ordered by events."""

    def __init__(self, source: torch.device, target: torch.device) -> None:
        self.source, self.target = source, target
        self.leaving, self.arriving = torch.cuda.Stream(source), torch.cuda.Stream(target)  # type: ignore[no-untyped-call]

    def send(self, value: Any) -> Any:
        if value is None:
            return None, None
        produced = torch.cuda.current_stream(self.source).record_event()
        self.leaving.wait_event(produced)
        self.arriving.wait_event(produced)
        with torch.cuda.stream(self.leaving), torch.cuda.stream(self.arriving):
            copy = _alike(value, lambda tensor: tensor.to(self.target, non_blocking=True))
        value.record_stream(self.leaving)
        return copy, self.arriving.record_event()

    def receive(self, parcel: Any) -> Any:
        copy, arrived = parcel
        if copy is not None:
            stream = torch.cuda.current_stream(self.target)
            stream.wait_event(arrived)
            copy.record_stream(stream)
        return copy


def _alike(value: torch.Tensor, copy: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A copy that is a leaf and wants a gradient exactly when the original does."""
    return copy(value.detach()).requires_grad_(value.requires_grad)


def link(source: torch.device, target: torch.device) -> Link:
    """The link from one device to another."""
    if source == target:
        return Link()
    both = source.type == target.type == "cuda"
    return StreamCopy(source, target) if both else BlockingCopy(target)


def to_device(value: Any, device: torch.device) -> Any:
    """An input or target on its way from the host: tensors go to the device, in nested structures too."""
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device, non_blocking=True)
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), value)
