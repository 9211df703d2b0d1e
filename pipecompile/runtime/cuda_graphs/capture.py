"""Capture of a run's kernels as a CUDA graph.

    capture(run)    run() ─► kernels, recorded and not executed ─► a CUDA graph      replay()    all of them, in one launch

The memory that the run allocated stays the graph's: a replay reads and writes at the same addresses. This file has CUDA's
way; the tests emulate another on a CPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

__all__ = ["CudaGraphCapture", "GraphCapture", "graph_captures"]

T = TypeVar("T")


class GraphCapture(Protocol):
    """Captures runs that follow each other; replays must follow the same order."""

    def rehearse(self, run: Callable[[], T]) -> tuple[T, str | None]:
        """Run uncaptured. Return the result, and a reason why the run cannot be captured, or None."""

    def capture(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Return the run's result, whose tensors get values by each replay, and the replay. Raise if the run cannot be captured."""

    def drain(self) -> None:
        """Wait for launched replays, before their memory is released."""


def graph_captures(device: torch.device) -> Callable[[], GraphCapture] | None:
    """Return the constructor of captures for a device, or None for a device without graphs."""
    return partial(CudaGraphCapture, device) if device.type == "cuda" else None


class CudaGraphCapture:
    """CUDA graphs that share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def rehearse(self, run: Callable[[], T]) -> tuple[T, str | None]:
        """Run uncaptured, and look for a synchronization of the host with the device, which would break a capture."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                result = run()
            finally:
                torch.cuda.set_sync_debug_mode(before)
        waits = [each for each in caught if "synchronizing CUDA operation" in str(each.message)]
        for each in caught:
            if each not in waits and "Synchronization debug mode" not in str(each.message):
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        return result, f"the host waits for the device ({waits[0].filename}:{waits[0].lineno})" if waits else None

    def capture(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Capture the run on a side stream. Other threads may go on using CUDA meanwhile."""
        graph = torch.cuda.CUDAGraph()
        capturing = torch.cuda.graph(graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local")
        with torch.cuda.device(self.device), capturing:
            result = run()
        self._pool = graph.pool()
        return result, graph.replay

    def drain(self) -> None:
        """Synchronize with the device."""
        torch.cuda.synchronize(self.device)
