"""Accelerators: what `torch.accelerator` lacks in torch 2.11, the oldest torch that is supported."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

__all__ = [
    "OnStreams", "accelerator_indices", "accelerator_type", "default_generator", "device_memory", "device_name", "forked_generators",
    "initialized_devices", "is_accelerator", "random_state", "set_random_state", "synchronize_all",
]  # fmt: skip


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device has streams, on which work runs beside the host."""
    return device.type not in ("cpu", "meta")


def accelerator_type() -> str | None:
    """Return the type of the accelerators of this machine that have streams, such as "cuda"; None without any. 2.11.

    `torch.accelerator.current_accelerator` names the type that torch was built for, with or without a device.
    """
    device = torch.accelerator.current_accelerator()
    return None if device is None or device.type == "mps" or not torch.accelerator.is_available() else device.type


def accelerator_indices() -> range:
    """Return the indices of the accelerators that have streams."""
    return range(0 if accelerator_type() is None else torch.accelerator.device_count())


def random_state(device: torch.device) -> torch.Tensor:
    """Return the state of the default random generator of a device. 2.11 has none for all types of devices."""
    state: torch.Tensor = (
        torch.get_device_module(device.type).get_rng_state(device) if is_accelerator(device) else torch.get_rng_state()
    )
    return state


def set_random_state(state: torch.Tensor, device: torch.device) -> None:
    """Restore what `random_state` returned."""
    if is_accelerator(device):
        torch.get_device_module(device.type).set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def forked_generators(devices: Iterable[torch.device]) -> AbstractContextManager[None]:
    """Return a context that restores the default random generators of the CPU and of the accelerators among `devices`."""
    accelerators = sorted({device for device in devices if is_accelerator(device)}, key=str)
    kind = accelerators[0].type if accelerators else "cuda"
    context: AbstractContextManager[None] = torch.random.fork_rng(devices=accelerators, device_type=kind)
    return context


def default_generator(device: torch.device) -> torch.Generator:
    """Return the default random generator of an accelerator. 2.11."""
    generator: torch.Generator = torch.get_device_module(device.type).default_generators[device.index]
    return generator


def initialized_devices() -> list[torch.device]:
    """Return the current accelerator if its runtime is up, without starting it. 2.11."""
    kind = accelerator_type()
    is_up = kind is not None and torch.get_device_module(kind).is_initialized()
    return [torch.device(str(kind), torch.accelerator.current_device_index())] if is_up else []


def device_name(device: torch.device) -> str:
    """Return the full name of an accelerator, such as "NVIDIA H100 80GB HBM3". 2.11."""
    return str(torch.get_device_module(device.type).get_device_name(device))


def device_memory(device: torch.device) -> int:
    """Return the memory of an accelerator in bytes. 2.11."""
    return int(torch.get_device_module(device.type).get_device_properties(device).total_memory)


def synchronize_all() -> None:
    """Return when all accelerators of this machine are idle."""
    for index in accelerator_indices():
        torch.accelerator.synchronize(index)


class OnStreams:
    """Context in which streams, at most one per device, are the current ones of their devices, and the last one's device is current.

    `with torch.Stream(...)` keeps the streams before in the stream itself, so it cannot be entered twice. 2.11.
    """

    __slots__ = ("before", "index", "streams")

    def __init__(self, *streams: Any) -> None:
        self.streams = streams

    def __enter__(self) -> None:
        self.index = torch.accelerator.current_device_index()
        self.before = [torch.accelerator.current_stream(stream.device) for stream in self.streams]
        for stream in self.streams:
            torch.accelerator.set_stream(stream)

    def __exit__(self, *_: object) -> None:
        for stream in reversed(self.before):
            torch.accelerator.set_stream(stream)
        torch.accelerator.set_device_index(self.index)
