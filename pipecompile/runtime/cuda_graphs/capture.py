"""How a device captures what it is made to launch, so that it can be launched again at once.

    capture(run)    run() ─► launches, noted and not executed ─► a CUDA graph      replay()    all of them, in one launch

The memory that the run took stays its own: a replay reads and writes where the run would have. CUDA's way is here; the tests
emulate another.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

__all__ = ["CudaTape", "Tape", "tapes_on"]

T = TypeVar("T")


class Tape(Protocol):
    """Captures runs that follow each other, and are replayed in that order."""

    def rehearse(self, run: Callable[[], T]) -> tuple[T, str | None]:
        """Run as it is. Why it cannot be captured, if that shows."""

    def capture(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """What the run returns, whose tensors have values after each replay, and the replay. Raises what cannot be captured."""

    def drain(self) -> None:
        """Wait for replays that were launched: their memory is about to be given back."""


def tapes_on(device: torch.device) -> Callable[[], Tape] | None:
    """What makes tapes; None for a device that has no graphs."""
    return partial(CudaTape, device) if device.type == "cuda" else None


class CudaTape:
    """CUDA graphs that share a pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def rehearse(self, run: Callable[[], T]) -> tuple[T, str | None]:
        """A host that waits for the device breaks a capture, so it is found out before."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                made = run()
            finally:
                torch.cuda.set_sync_debug_mode(before)
        waits = [each for each in told if "synchronizing CUDA operation" in str(each.message)]
        for each in told:
            if each not in waits and "Synchronization debug mode" not in str(each.message):
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        return made, f"the host waits for the device ({waits[0].filename}:{waits[0].lineno})" if waits else None

    def capture(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        around = torch.cuda.graph(graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local")
        with torch.cuda.device(self.device), around:
            made = run()
        self._pool = graph.pool()
        return made, graph.replay

    def drain(self) -> None:
        torch.cuda.synchronize(self.device)
