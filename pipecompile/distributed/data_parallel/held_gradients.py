"""Gradients that steps under `pipe.no_sync()` leave on a copy of the pipeline; the next step outside of it sums them over the copies.

    with pipe.no_sync():
        step      own part ──► held            no message of gradients; .grad is not a number (NaN)
    step          own part + held ──► summed over the copies ──► added to what .grad was before

If `zero_grad()` clears gradients in between, the held parts are dropped as well. `DistributedDataParallel` has the same context; there
`.grad` is the part of one copy meanwhile, for which a sharded parameter has no place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from pipecompile.errors import InputError
from pipecompile.torch_private.dtensors import local
from pipecompile.torch_private.storages import version_of

__all__ = ["HeldGradients", "Part"]

Part = tuple[nn.Parameter, torch.Tensor | None]
"""A parameter that is trained, as the script sees it, and what this copy adds to its gradient, weighted by its part of the batch."""


@dataclass(frozen=True, slots=True)
class _Held:
    """The gradient of a parameter that is held: its `total`, None if this copy has none, what was `summed` before, and what the script
    sees meanwhile, with its version counter.
    """

    total: torch.Tensor | None
    summed: torch.Tensor | None
    shown: torch.Tensor
    version: int

    def is_seen(self, gradient: torch.Tensor | None) -> bool:
        """Return whether this is the gradient that the script sees, as far as versions tell: functions on lists of tensors do not count
        those of DTensors.
        """
        return gradient is self.shown and version_of(self.shown) == self.version


class HeldGradients:
    """The gradients that are held for the parameters of a rank. `is_on`: steps hold theirs now."""

    def __init__(self) -> None:
        self.is_on = False
        self._held: dict[nn.Parameter, _Held] = {}

    @property
    def mode(self) -> str:
        """The mode of a call, in words, as ranks compare it."""
        return "under no_sync" if self.is_on else ""

    @property
    def count(self) -> int:
        """Number of parameters whose gradients are held."""
        return len(self._held)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Let steps in this context hold their gradients."""
        before, self.is_on = self.is_on, True
        try:
            yield
        finally:
            self.is_on = before

    @contextmanager
    def revealed(self) -> Iterator[None]:
        """Let `.grad` be what was summed before, in a step."""
        for parameter, held in self._held.items():
            parameter.grad = held.summed
        try:
            yield
        finally:
            for parameter, held in self._held.items():
                parameter.grad = held.shown

    @torch.no_grad()
    def keep(self, parts: Iterable[Part]) -> None:
        """Add the parts of one step, whose gradients are revealed."""
        for parameter, part in parts:
            total, known = self.of(parameter), self._held.get(parameter)
            shown = torch.full_like(parameter, torch.nan) if known is None else known.shown
            total = part if total is None else total if part is None else total.add_(part)
            self._held[parameter] = _Held(total, parameter.grad, shown, version_of(shown))

    def of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the part held for a parameter; None if there is none."""
        held = self._held.get(parameter)
        return None if held is None else held.total

    def has(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter was trained by a step under `no_sync`, on all copies: it may be frozen by now."""
        return parameter in self._held

    def clear(self) -> None:
        """Hold nothing any more."""
        self._held.clear()

    def check(self) -> None:
        """Drop what is held for gradients that the script has cleared. Raise InputError for one that it has written: what is held, and
        what was summed, would be added to it.
        """
        self._drop_cleared()
        are_seen = all(held.is_seen(parameter.grad) for parameter, held in self._held.items())
        if not are_seen or not _are_hidden(held.shown for held in self._held.values()):
            raise InputError(
                "a gradient was written between a step under no_sync and the next step",
                why="the copies of the pipeline have not summed it yet",
                hint="zero_grad(set_to_none=True), which clears what the copies hold; or write it after a step outside of no_sync",
            )

    def refuse(self, what: str) -> None:
        """Raise InputError if something is held, for a call of the script that uses gradients."""
        self._drop_cleared()
        if self._held:
            raise InputError(
                f"{what} before the copies of the pipeline have summed their gradients",
                why="the steps since the last sum were under no_sync",
                hint="the last step of an accumulation outside of `with pipe.no_sync():`",
            )

    def _drop_cleared(self) -> None:
        self._held = {parameter: held for parameter, held in self._held.items() if parameter.grad is not None}


def _are_hidden(gradients: Iterable[torch.Tensor]) -> bool:
    """Return whether the first elements of gradients are not numbers. A GPU is waited for once."""
    parts = [local(gradient) for gradient in gradients]
    first = [part.reshape(-1)[0].isnan() for part in parts if part.numel()]
    return not first or bool(torch.stack(first).all())
