"""Devices: values on their way to one, and torch's functions that take one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.utils._device import _device_constructors

from pipecompile.torch_private.accelerators import accelerator_type, is_accelerator

__all__ = [
    "device_constructors",
    "device_identity",
    "end_allocations",
    "is_capturing",
    "keep_busy",
    "requested_device",
    "to_device",
]

device_constructors: Callable[[], set[Callable[..., Any]]] = _device_constructors
"""Return the functions of torch that make a tensor and take `device=`. 2.11."""


def end_allocations(device: torch.device, pool: Any, *, is_shared: bool) -> None:
    """End allocations to the memory pool of a CUDA graph whose capture failed, and release the pool unless others use it. 2.11.

    Does nothing if the capture has ended them itself.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    steps: list[Callable[..., object]] = [torch._C._cuda_endAllocateToPool]
    for step in steps if is_shared else [*steps, torch._C._cuda_releasePool]:
        with suppress(RuntimeError):
            step(index, pool)


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is captured on the current stream. The host cannot read the random generator of its device then."""
    is_begun = device.type == "cuda" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return is_begun and torch.cuda.is_current_stream_capturing()


def device_identity(device: torch.device) -> str:
    """Return a text that no other GPU has; empty for a CPU. 2.11."""
    if device.type != "cuda":
        return ""
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.uuid}"


def keep_busy(seconds: float) -> None:
    """Launch a kernel that does nothing for about `seconds` seconds on the current stream of the current GPU. 2.11.

    Accelerators other than CUDA's have no such kernel: there nothing is launched.
    """
    if accelerator_type() in (None, "cuda"):
        torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]


CYCLES_PER_SECOND = 2e9
"""Clock cycles per second of a GPU, rounded up."""


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on `device`.

    The host waits for a copy to the CPU: without that, torch copies into page-locked memory, which is read before the copy is over. So it
    does for a copy from page-locked memory, which the caller may write before that.
    """
    if tensor.device == device:
        return tensor
    is_queued = is_accelerator(device) and not (tensor.is_cpu and tensor.is_pinned())
    return tensor.to(device, non_blocking=is_queued)


def requested_device(*args: Any, **kwargs: Any) -> torch.device | None:
    """Return the device that these arguments of `nn.Module.to` name, or None. 2.11."""
    device: torch.device | None = torch._C._nn._parse_to(*args, **kwargs)[0]
    return device
