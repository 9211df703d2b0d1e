"""Copies of tied tensors in the memory of another device than their home: refreshed before a run, settled after it.

    home    cuda:0   wte.weight ──── refresh ───►  mirror, cuda:3     before a run: the home's numbers
                     wte.weight.grad ◄── settle ── mirror.grad        after it: one gradient, added once

The home is the model's own tensor, the only one that optimizers and `state_dict` know. A refresh is made before every run,
for a write through `.data` leaves no trace to go by; it leaves no trace itself, so that a forward whose backward is yet to
come stays valid.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import nn

__all__ = ["Borrowing", "Mirror", "Mirrors"]


@dataclass(slots=True)
class Mirror:
    """One tensor in a second place."""

    home: torch.Tensor
    copy: torch.Tensor
    version: int = 0

    @classmethod
    def of(cls, home: torch.Tensor, device: torch.device) -> Mirror:
        """A new mirror on `device`: a parameter of a parameter, else a plain tensor."""
        copy = home.detach().to(device, copy=True)
        return cls(home, nn.Parameter(copy, home.requires_grad) if isinstance(home, nn.Parameter) else copy)

    def refresh(self) -> None:
        """Make it what the home is. A gradient left over from a run that failed is dropped."""
        there = self.copy.device
        if (self.copy.shape, self.copy.dtype) == (self.home.shape, self.home.dtype):
            self.copy.data.copy_(self.home.data, non_blocking=True)
        else:
            self.copy.data = self.home.data.to(there)
        self.copy.requires_grad_(self.home.requires_grad)
        self.copy.grad = None
        self.version = self.copy._version

    def settle(self) -> None:
        """Bring home what the run left here: the gradient, through the home's own place in autograd, and writes."""
        gradient, self.copy.grad = self.copy.grad, None
        if gradient is not None:
            torch.autograd.backward((self.home,), (gradient.to(self.home.device),))
        if not isinstance(self.home, nn.Parameter) or self.copy._version != self.version:
            self.home.data.copy_(self.copy.data, non_blocking=True)


class Mirrors:
    """The mirrors of one build. Who writes a tensor shares its stage with all who read it, so only one mirror can differ."""

    def __init__(self, mirrors: Iterable[Mirror] = ()) -> None:
        self.mirrors = tuple(mirrors)

    def refresh(self) -> None:
        """Before a run."""
        if self.mirrors:
            with torch.inference_mode(False), torch.no_grad():
                for mirror in self.mirrors:
                    mirror.refresh()

    def settle(self) -> None:
        """After a run that succeeded."""
        if self.mirrors:
            with torch.inference_mode(False), torch.no_grad():
                for mirror in self.mirrors:
                    mirror.settle()


class Borrowing(nn.Module):
    """A module of the user that runs on mirrors: they take the place of its own tensors for the length of a call.

    The module stays itself, for its hooks and whatever it notes on itself. Whoever calls it, or runs it on its own tensors
    elsewhere, holds `lock` meanwhile.
    """

    def __init__(self, module: nn.Module, loans: Iterable[tuple[nn.Module, str, Mirror]], lock: Lock) -> None:
        super().__init__()
        self.module, self.loans, self.lock = module, tuple(loans), lock
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            try:
                for owner, name, mirror in self.loans:
                    setattr(owner, name, mirror.copy)
                return self.module(*args, **kwargs)
            finally:
                for owner, name, mirror in self.loans:
                    setattr(owner, name, mirror.home)
