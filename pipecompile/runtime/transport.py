"""Moving values: from one device to another, and between a device and the host.

    1F0 ──► SEND ──► channel ──► RECV ──► 2F0       in shared memory: the tensor itself
              │                    └──────────────── between CPU and GPU: copied here, by the receiver
              └───────────────────────────────────── between two GPUs: copied here, by the sender

`stream_events.py` decides when and on which stream a copy runs. Each function of a frame here is a closure over register
and channel indices, because each instruction of each step calls one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipecompile.batching.containers import on_device, with_tensors
from pipecompile.runtime.registers import Frame, Run
from pipecompile.torch_private.accelerators import is_accelerator

__all__ = [
    "ABORT", "Aborted", "BlockingCopy", "CardCopy", "Link", "PeerCopy", "Upload", "arrive", "copy_into", "depart", "depart_gradient", "link",
    "receive", "send", "take_from", "then_free", "upload_into",
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
        return _copied(value, lambda tensor: tensor.to(self.target))


class Upload(Link):
    """Transfer from the host to a GPU: a copy through page-locked memory, which torch keeps, so the host does not wait for it."""

    def __init__(self, target: torch.device) -> None:
        self.target = target

    def send(self, value: Any) -> Any:
        return with_tensors(value, self._copied)

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == self.target:
            return tensor
        is_strided = tensor.device.type == "cpu" and tensor.layout is torch.strided
        is_staged = is_strided and (tensor.nbytes > SMALL_BYTES or tensor.is_pinned())
        pinned = page_locked(_own_elements(tensor.detach())) if is_staged else tensor
        return _copied_leaf(pinned, lambda source: source.to(self.target, non_blocking=True)).requires_grad_(
            tensor.requires_grad
        )


def page_locked(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in page-locked memory of ours, also of a tensor in such memory: the caller may write that when the step has been
    launched, and the device reads it later.
    """
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor)


def _own_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose elements do not share memory, as those of an expanded one do: torch cannot write such a copy."""
    is_expanded = any(size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.contiguous() if is_expanded else tensor


SMALL_BYTES = 1 << 16
"""Bytes up to which the driver copies from any memory without waiting (CUDA programming guide, "API synchronization behavior")."""


class PeerCopy(Link):
    """Transfer between two GPUs: a copy by the sender, on the current streams of both devices."""

    def __init__(self, target: torch.device) -> None:
        self.target = target

    def send(self, value: Any) -> Any:
        return _copied(value, lambda tensor: tensor.to(self.target, non_blocking=True))


class CardCopy(Link):
    """Transfer between two pipeline devices on one GPU: a copy by the sender within the memory of the card."""

    def send(self, value: Any) -> Any:
        return _copied(value, torch.clone)


def _copied(value: Any, copy: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of a tensor, or of the tensors in nested containers; any other value itself."""
    if isinstance(value, torch.Tensor):
        return _copied_leaf(value, copy)
    return with_tensors(value, lambda tensor: _copied_leaf(tensor, copy))


def _copied_leaf(value: torch.Tensor, copy: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return a copy that is a leaf of autograd and requires a gradient if `value` does."""
    return copy(value.detach()).requires_grad_(value.requires_grad)


def link(source: torch.device, target: torch.device) -> Link:
    """Return the link from one device to another."""
    if source == target:
        return Link()
    return PeerCopy(target) if is_accelerator(source) and is_accelerator(target) else BlockingCopy(target)


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


def copy_into(buffer: int, register: int, over: Link) -> Run:
    """Return the function of a SEND on a stream of its own. The buffer's last tensor goes first: its memory serves the copy."""

    def run(frame: Frame) -> None:
        frame.registers[buffer] = None
        frame.registers[buffer] = over.send(frame.registers[register])

    return run


def upload_into(buffer: int, register: int, key: tuple[str, bool], microbatch: int, over: Link) -> Run:
    """Return the function of a RECV from the host on a stream of its own."""

    def run(frame: Frame) -> None:
        frame.registers[buffer] = frame.registers[register] = None
        given = frame.arrivals[key][microbatch]
        sent = frame.registers[register] = over.send(given)
        if sent is not given:  # what is there already is the caller's
            frame.registers[buffer] = sent

    return run


def take_from(buffer: int, register: int) -> Run:
    """Return the function of a RECV whose value is in a receive buffer, or will be there when its readers run."""

    def run(frame: Frame) -> None:
        frame.registers[register] = frame.registers[buffer]

    return run


# -- between a device and the host ------------------------------------------------------------------------------------


def arrive(key: tuple[str, bool], microbatch: int, register: int, device: torch.device) -> Run:
    """Return the function of a RECV from the host: an input, a target or the gradient of an output."""

    def run(frame: Frame) -> None:
        value = frame.arrivals[key][microbatch]
        is_there = isinstance(value, torch.Tensor) and value.device == device
        frame.registers[register] = value if is_there else on_device(value, device)

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


def then_free(run: Run, registers: Sequence[int]) -> Run:
    """Return a function that runs `run` and then frees registers."""
    if not registers:
        return run
    first, *others = registers

    def run_and_free(frame: Frame) -> None:
        run(frame)
        frame.registers[first] = None

    def run_and_free_all(frame: Frame) -> None:
        run(frame)
        for index in registers:
            frame.registers[index] = None

    return run_and_free_all if others else run_and_free
