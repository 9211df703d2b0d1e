"""Mirrors: copies of tied tensors on further devices than their home, refreshed before a run and written back after it.

    home    cuda:0   wte.weight ──── refresh ───►  mirror, cuda:3     before a run: the values of the home
                     wte.weight.grad ◄── settle ── mirror.grad        after it: one gradient, added once

The home is the model's own tensor, which optimizers and `state_dict` refer to. Every run begins with a refresh, because a
write through `.data` does not change the tensor's version. The refresh writes through `.data` as well, so a forward whose
backward is still to run stays valid for autograd.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import nn

from pipecompile.ir.directions import Placement
from pipecompile.torch_private.accelerators import is_accelerator
from pipecompile.torch_private.recurrent_layers import noted_weights
from pipecompile.torch_private.storages import version_of

__all__ = ["Mirror", "MirroredModule", "Mirrors"]


@dataclass(slots=True)
class Mirror:
    """A tensor and its copy on another device. `version` is the autograd version of `copy` after the last refresh."""

    home: torch.Tensor
    copy: torch.Tensor
    version: int = 0

    @classmethod
    def of(cls, home: torch.Tensor, device: torch.device) -> Mirror:
        """Create a mirror of `home` on `device`: an `nn.Parameter` if `home` is one, else a plain tensor."""
        copy = home.detach().to(device, copy=True)
        return cls(home, nn.Parameter(copy, home.requires_grad) if isinstance(home, nn.Parameter) else copy)

    def refresh(self) -> None:
        """Copy values, shape, dtype and `requires_grad` from the home. Drop a gradient left by a failed run."""
        device = self.copy.device
        if (self.copy.shape, self.copy.dtype) == (self.home.shape, self.home.dtype):
            self.copy.data.copy_(self.home.data, non_blocking=True)
        else:
            self.copy.data = self.home.data.to(device)
        self.copy.requires_grad_(self.home.requires_grad)
        self.copy.grad = None
        self.version = version_of(self.copy)

    def settle(self) -> None:
        """Write back to the home: add the mirror's gradient through the home's AccumulateGrad node, and copy in-place writes."""
        gradient, self.copy.grad = self.copy.grad, None
        if gradient is not None:
            torch.autograd.backward((self.home,), (gradient.to(self.home.device),))
        if not isinstance(self.home, nn.Parameter) or version_of(self.copy) != self.version:
            self.home.data.copy_(self.copy.data, non_blocking=is_accelerator(self.home.device))


@dataclass(eq=False)
class Mirrors:
    """The mirrors of one build. At most one mirror of a tensor can differ from its home after a run, because an operation that
    writes a tensor shares its stage with all operations that read the tensor.

    `placements` are those of the stages, and of their further copies, which have mirrors of all their tensors; empty without copies.
    """

    mirrors: tuple[Mirror, ...] = ()
    placements: tuple[Placement, ...] = ()

    def joined_with(self, others: Iterable[Mirrors]) -> Mirrors:
        """Return the mirrors of this build and of others, for a run of all of them."""
        return Mirrors((*self.mirrors, *(mirror for one in others for mirror in one.mirrors)))

    def refresh(self) -> None:
        """Refresh every mirror; to be called before a run."""
        if self.mirrors:
            with torch.inference_mode(False), torch.no_grad():
                for mirror in self.mirrors:
                    mirror.refresh()

    def settle(self) -> None:
        """Write every mirror back; to be called after a run that succeeded."""
        if self.mirrors:
            with torch.inference_mode(False), torch.no_grad():
                for mirror in self.mirrors:
                    mirror.settle()


class MirroredModule(nn.Module):
    """A module of the user whose tied tensors are replaced by mirrors during each call.

    `substitutions` has (owner module, attribute name, mirror). The module object stays the user's: hooks and attributes set in
    `forward` work. Concurrent calls exclude each other by `lock`, including calls on the module's own tensors in other stages.
    """

    def __init__(self, module: nn.Module, substitutions: Iterable[tuple[nn.Module, str, Mirror]], lock: Lock) -> None:
        super().__init__()
        self.module, self.substitutions, self.lock = module, tuple(substitutions), lock
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            try:
                for owner, name, mirror in self.substitutions:
                    setattr(owner, name, mirror.copy)
                with noted_weights(owner for owner, _, _ in self.substitutions):
                    return self.module(*args, **kwargs)
            finally:
                for owner, name, mirror in self.substitutions:
                    setattr(owner, name, mirror.home)
