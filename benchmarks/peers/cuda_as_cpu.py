"""Code that asks for CUDA gets the CPU: for peers that have no way without a GPU. The answers say where this was needed."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class CudaAsCpu(TorchFunctionMode):
    """Replace `device="cuda"` by the CPU in calls of torch."""

    def __torch_function__(self, function: Any, _: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def pretend() -> None:
    """Make torch.cuda's questions for a device harmless, until the process ends."""
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.set_device = lambda _: None
    torch.cuda.device = lambda device: device  # type: ignore[assignment,misc]
    torch.cuda.synchronize = lambda *_: None
    CudaAsCpu().__enter__()
