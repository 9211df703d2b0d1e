"""Settings of the process by which torch chooses kernels, read and written at once: a forward may set them for a part of itself.

    with sdpa_kernel(SDPBackend.MATH):          flash_sdp False, mem_efficient_sdp False, cudnn_sdp False
        y = F.scaled_dot_product_attention(...)

Precisions of float32 (TF32), numbers of threads and the default dtype are not among them: no context manager of torch sets these, and
the old function for precisions fails where the new attributes are used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["KernelSettings", "captured_settings", "kernel_settings", "set_kernel_settings", "settings_beside"]

KernelSettings = tuple[tuple[str, Any], ...]
"""Names of settings with their values."""


def _set_deterministic(mode: str) -> None:
    torch.use_deterministic_algorithms(mode != "off", warn_only=mode == "warn")


def _deterministic() -> str:
    if not torch.are_deterministic_algorithms_enabled():
        return "off"
    return "warn" if torch.is_deterministic_algorithms_warn_only_enabled() else "on"


def _cudnn(name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    cudnn = torch.backends.cudnn
    return lambda: getattr(cudnn, name), lambda value: setattr(cudnn, name, value)


_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "flash_sdp": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    "mem_efficient_sdp": (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    "math_sdp": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    "cudnn_sdp": (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    "mkldnn": (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    "cudnn": _cudnn("enabled"),
    "cudnn_benchmark": _cudnn("benchmark"),
    "cudnn_deterministic": _cudnn("deterministic"),
    "deterministic": (_deterministic, _set_deterministic),
}


def kernel_settings() -> KernelSettings:
    """Return the present settings."""
    return tuple([(name, read()) for name, (read, _) in _SETTINGS.items()])


def captured_settings() -> tuple[Any, ...]:
    """Return what decides which kernels a CUDA graph contains: the settings, and the precisions of float32 and of sums. 2.11."""
    matmul = torch.backends.cuda.matmul
    precisions = [torch._C._get_fp32_precision_getter("cuda", operation) for operation in ("matmul", "conv", "rnn")]
    return (
        *kernel_settings(), *precisions, matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction,
    )  # fmt: skip


_TOGETHER = (
    ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp"),
    ("cudnn", "cudnn_benchmark", "cudnn_deterministic"),
)
"""Settings that torch's context managers set together."""


def settings_beside(settings: KernelSettings, outside: KernelSettings) -> KernelSettings:
    """Return the settings that are others than `outside`, with those that were set together with them: the caller may change these
    outside later.
    """
    around = dict(outside)
    others = {name for name, value in settings if name not in around or around[name] != value}
    others |= {name for names in _TOGETHER if others.intersection(names) for name in names}
    return tuple(pair for pair in settings if pair[0] in others)


def set_kernel_settings(settings: KernelSettings) -> None:
    """Write these settings; others stay."""
    for name, value in settings:
        read, write = _SETTINGS[name]
        if read() != value:
            write(value)
