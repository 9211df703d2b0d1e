"""Settings of the process that a forward may leave changed, beside the modes of its thread: each has a name for messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pipecompile.torch_private.kernel_settings import kernel_settings, set_kernel_settings

__all__ = ["ProcessSettings"]

_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    "torch's choice of kernels": (kernel_settings, set_kernel_settings),
}


class ProcessSettings:
    """The settings at the time of construction."""

    def __init__(self) -> None:
        self._then = {name: read() for name, (read, _) in _SETTINGS.items()}

    def restore(self) -> list[str]:
        """Put back the settings that are others now, and return their names."""
        changed = [name for name, (read, _) in _SETTINGS.items() if read() != self._then[name]]
        for name in changed:
            _SETTINGS[name][1](self._then[name])
        return changed
