"""Moving values: from one device to another, and between a device and the host.

    1F0 ──► SEND ──► channel ──► RECV ──► 2F0       in shared memory: the tensor itself
              │                    └──────────────── between CPU and GPU: copied here, by the receiver
              └───────────────────────────────────── between two GPUs: copied here, by the sender

`stream_events.py` decides when and on which stream a copy runs. Each function of a frame here is a closure over register
and channel indices, because each instruction of each step calls one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pipecompile.runtime.registers import Frame, Run
from pipecompile.torch_private.device_functions import to_device

__all__ = [
    "ABORT", "Aborted", "BlockingCopy", "Link", "PeerCopy", "arrive", "depart", "depart_gradient", "link", "receive", "send",
]  # fmt: skip


class Link:
    """Transfer between two pipeline devices that share memory: no copy. Base class of the links that copy."""

    def send(self, value: Any) -> Any:
        """Return what goes into the channel for `value`."""
        return value

    def receive(self, value: Any) -> Any:
        """Return what goes into the receiver's register for a value of the channel."""
        return value


class BlockingCopy(Link):
    """Transfer between CPU and GPU: a copy by the receiver, in the order of its stream."""

    def __init__(self, target: torch.device) -> None:
        self.target = target

    def receive(self, value: Any) -> Any:
        return None if value is None else _copied_leaf(value, lambda tensor: tensor.to(self.target))


class PeerCopy(Link):
    """Transfer between two GPUs: a copy by the sender, on the current streams of both devices."""

    def __init__(self, target: torch.device) -> None:
        self.target = target

    def send(self, value: Any) -> Any:
        return None if value is None else _copied_leaf(value, lambda tensor: tensor.to(self.target, non_blocking=True))


def _copied_leaf(value: torch.Tensor, copy: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return a copy that is a leaf of autograd and requires a gradient if `value` does."""
    return copy(value.detach()).requires_grad_(value.requires_grad)


def link(source: torch.device, target: torch.device) -> Link:
    """Return the link from one device to another."""
    if source == target:
        return Link()
    return PeerCopy(target) if source.type == target.type == "cuda" else BlockingCopy(target)


# -- between two devices ----------------------------------------------------------------------------------------------


class Aborted(Exception):
    """Stops a device because another device failed."""


ABORT = object()
"""Sentinel that a failing device puts into every channel."""


def send(register: int, channel: int, over: Link, *, threaded: bool) -> Run:
    """Return the function of a SEND."""
    convert = None if type(over) is Link else over.send

    def inline(frame: Frame) -> None:
        value = frame.registers[register]
        frame.channels[channel] = value if convert is None else convert(value)

    def queued(frame: Frame) -> None:
        value = frame.registers[register]
        frame.channels[channel].put(value if convert is None else convert(value))

    return queued if threaded else inline


def receive(register: int, channel: int, over: Link, *, threaded: bool) -> Run:
    """Return the function of a RECV, which raises Aborted if it takes ABORT from its channel."""
    convert = None if type(over) is Link else over.receive

    def inline(frame: Frame) -> None:
        value, frame.channels[channel] = frame.channels[channel], None
        frame.registers[register] = value if convert is None else convert(value)

    def queued(frame: Frame) -> None:
        value = frame.channels[channel].get()
        if value is ABORT:
            raise Aborted
        frame.registers[register] = value if convert is None else convert(value)

    return queued if threaded else inline


# -- between a device and the host ------------------------------------------------------------------------------------


def arrive(key: tuple[str, bool], microbatch: int, register: int, device: torch.device) -> Run:
    """Return the function of a RECV from the host: an input, a target or the gradient of an output."""

    def run(frame: Frame) -> None:
        value = frame.arrivals[key][microbatch]
        is_there = isinstance(value, torch.Tensor) and value.device == device
        frame.registers[register] = value if is_there else to_device(value, device)

    return run


def depart(key: tuple[str, bool], microbatch: int, register: int) -> Run:
    """Return the function of a SEND of an output to the host. A tensor goes without its graph and keeps `requires_grad`."""

    def run(frame: Frame) -> None:
        value = frame.registers[register]
        if isinstance(value, torch.Tensor):
            value = value.detach().requires_grad_(value.requires_grad)
        frame.departures[key][microbatch] = value

    return run


def depart_gradient(key: tuple[str, bool], microbatch: int, register: int, consumer: int) -> Run:
    """Return the function of a SEND of an input's gradient to the host. Stages that use the input send one each, in any thread."""

    def run(frame: Frame) -> None:
        frame.departures[key][microbatch][consumer] = frame.registers[register]

    return run
