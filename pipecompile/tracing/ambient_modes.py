"""Grad mode and autocast of this thread, and settings of kernels: the ambient state in which the recorder sees a call."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from pipecompile.torch_private.accelerators import accelerator_type
from pipecompile.torch_private.kernel_settings import (
    KernelSettings,
    kernel_settings,
    set_kernel_settings,
    settings_beside,
)

__all__ = ["Ambient", "INFERENCE_MODE", "LAYOUTS", "autocast_depth", "autocast_kinds", "contained"]

LAYOUTS = "layouts of tensors"
INFERENCE_MODE = "inference mode"
"""Facts beside its state that a model may read: a recording then depends on them."""


Kinds = tuple[tuple[str, str | None, bool], ...]


@dataclass(frozen=True, slots=True)
class Ambient:
    """Grad mode, and the autocast dtype (None when off) of the CPU and of the accelerator in use.

    `nesting` counts the autocast regions around: a weight is cast once per outermost region. `kernels` are the settings by which torch
    chooses kernels.
    """

    grad: bool
    autocast: Kinds
    nesting: int = 0
    kernels: KernelSettings = ()

    @classmethod
    def now(cls, *, grad: bool | None = None) -> Ambient:
        """Return the state of this thread; `grad` overrides its grad mode."""
        grad = torch.is_grad_enabled() if grad is None else grad
        return cls(grad, autocast_kinds(), autocast_depth(), kernel_settings())

    def kernels_beside(self, outside: Ambient) -> KernelSettings:
        """Return the settings of kernels that are set here, and not `outside`."""
        return () if self.kernels == outside.kernels else settings_beside(self.kernels, outside.kernels)


def autocast_kinds() -> Kinds:
    """Return for each type of device its autocast dtype, None when off, and whether casts are cached."""
    has_cache = torch.is_autocast_cache_enabled()
    return tuple([(kind, _autocast_dtype(kind), has_cache) for kind in _kinds()])


@functools.cache
def _kinds() -> tuple[str, ...]:
    """Return the types of the devices of this machine, looked up once."""
    kind = accelerator_type()
    return ("cpu", kind) if kind else ("cpu",)


def _autocast_dtype(kind: str) -> str | None:
    return str(torch.get_autocast_dtype(kind)).removeprefix("torch.") if torch.is_autocast_enabled(kind) else None


@contextmanager
def contained() -> Iterator[None]:
    """Close the regions that the block entered and did not leave: code that raises inside a region leaves the region open."""
    grad, depth, kernels = torch.is_grad_enabled(), autocast_depth(), kernel_settings()
    kinds = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in {*_kinds(), "cuda"}]
    try:
        yield
    except BaseException:
        torch.set_grad_enabled(grad)
        set_kernel_settings(kernels)
        while autocast_depth() > depth:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
        for kind, enabled, dtype in kinds:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        raise


def autocast_depth() -> int:
    """Return the number of open autocast regions. Torch has no getter, but both counting calls return the number."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()
