"""Grad mode and autocast: the ambient state in which every call was recorded, and the nodes that bring it back.

    recorded                          in the graph
    with torch.no_grad():             before = is_grad_enabled()
        y = f(x)                      _set_grad_enabled(False)
    z = g(y)                          y = f(x)
                                      _set_grad_enabled(before)
                                      z = g(y)

The state is noted on each node and the switches are made anew wherever nodes are copied, so regions survive a cut. Outside
all regions the state is that of whoever runs the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import fx

from pipecompile.torch_private.modes import enter_autocast, exit_autocast, set_grad_enabled

__all__ = ["Ambient", "Regions", "contained"]


Kinds = tuple[tuple[str, str | None, bool], ...]


@dataclass(frozen=True, slots=True)
class Ambient:
    """Grad mode, and the autocast dtype (None when off) of the CPU and of the accelerator in use.

    `nesting` counts the autocast regions around: weights are cast anew when the outermost one is left.
    """

    grad: bool
    autocast: Kinds
    nesting: int = 0

    @classmethod
    def now(cls, *, grad: bool | None = None) -> Ambient:
        """The state of this thread; `grad` overrides its grad mode."""
        kinds = _kinds()
        cache = torch.is_autocast_cache_enabled()
        state = tuple((kind, _autocast_dtype(kind), cache) for kind in kinds)
        return cls(torch.is_grad_enabled() if grad is None else grad, state, _nesting())


@functools.cache
def _kinds() -> tuple[str, ...]:
    """The kinds of devices that there are, looked up once."""
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def _autocast_dtype(kind: str) -> str | None:
    return str(torch.get_autocast_dtype(kind)).removeprefix("torch.") if torch.is_autocast_enabled(kind) else None


def _nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


@contextmanager
def contained() -> Iterator[None]:
    """Who fails inside a region leaves it open: close all regions that were entered in the block and not left."""
    grad, depth = torch.is_grad_enabled(), _nesting()
    kinds = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    try:
        yield
    except BaseException:
        torch.set_grad_enabled(grad)
        while _nesting() > depth:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
        for kind, enabled, dtype in kinds:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        raise


class Regions:
    """Emits switches into `graph` whenever the ambient state of the next node differs from that of the last."""

    def __init__(self, graph: fx.Graph, outside: Ambient) -> None:
        self.graph, self.outside, self.now = graph, outside, outside
        self._open: list[tuple[Ambient, list[fx.Node]]] = []
        self._before: fx.Node | None = None

    def enter(self, ambient: Ambient) -> None:
        """Call before creating a node that was recorded under `ambient`."""
        if ambient == self.now:
            return
        while self._open and not _inside(ambient, self._open[-1][0]):
            self._leave()
        if ambient.nesting > self._innermost.nesting:
            self._open_autocast(ambient)
        if ambient.grad != self.now.grad:
            self._set_grad(ambient.grad)
        self.now = ambient

    def close(self) -> None:
        """Return to the state outside, before the output."""
        self.enter(self.outside)

    @property
    def _innermost(self) -> Ambient:
        return self._open[-1][0] if self._open else self.outside

    def _leave(self) -> None:
        for entered in reversed(self._open.pop()[1]):
            self._switch(exit_autocast, entered)

    def _open_autocast(self, ambient: Ambient) -> None:
        entered = []
        for (kind, dtype, cache), (_, around, _) in zip(ambient.autocast, self._innermost.autocast, strict=True):
            if dtype != around:
                kept = getattr(torch, dtype) if dtype else None
                entered.append(self._switch(enter_autocast, kind, kept, dtype is not None, cache))
        self._open.append((ambient, entered))

    def _set_grad(self, enabled: bool) -> None:
        if self._before is None:
            self._before = self._switch(torch.is_grad_enabled)
        self._switch(set_grad_enabled, self._before if enabled == self.outside.grad else enabled)

    def _switch(self, function: object, *args: object) -> fx.Node:
        node = self.graph.call_function(function, args)  # type: ignore[arg-type]
        node.meta.update(switch=True, val=None)
        return node


def _inside(ambient: Ambient, region: Ambient) -> bool:
    """Is that state this autocast region's own, or one further in?"""
    return ambient.nesting > region.nesting or (ambient.nesting, ambient.autocast) == (region.nesting, region.autocast)
