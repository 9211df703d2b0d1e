"""Devices: values on their way to one, and torch's functions that take one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

from pipecompile.torch_private.pytree import tree_map_only

__all__ = ["device_constructors", "keep_busy", "requested_device", "to_device"]

device_constructors: Callable[[], set[Callable[..., Any]]] = _device_constructors
"""Return the functions of torch that make a tensor and take `device=`. 2.11."""


def keep_busy(seconds: float) -> None:
    """Launch a kernel that does nothing for about so many seconds on the current stream of the current GPU. 2.11."""
    torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]


CYCLES_PER_SECOND = 2e9
"""Clock cycles per second of a GPU, rounded up."""


def to_device(value: Any, device: torch.device) -> Any:
    """Return an input or a target with its tensors on `device`, in nested containers too."""
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device, non_blocking=True)
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), value)


def requested_device(*args: Any, **kwargs: Any) -> torch.device | None:
    """Return the device that these arguments of `nn.Module.to` name, or None. 2.11."""
    device: torch.device | None = torch._C._nn._parse_to(*args, **kwargs)[0]
    return device
