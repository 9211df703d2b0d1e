"""Capture of a run's kernels as a CUDA graph.

    capture(run)    run() ─► kernels, recorded and not executed ─► a CUDA graph      replay()    all of them, in one launch

The memory that the run allocated stays the graph's: a replay reads and writes at the same addresses. This file has CUDA's
way; the tests emulate another on a CPU.

A capture that fails, as when the run waits for the device, must leave the process as it was. `torch.cuda.graph` does not: it ends the
capture before it restores the current stream, and when that raises, the stream stays, allocations go to the graph's pool, and in
older versions generators stay in capture mode. So the capture is begun and ended here, and mended if it fails.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from pipecompile.torch_private.device_functions import end_allocations

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


_STREAMS: dict[torch.device, Any] = {}
"""The capture stream of each device: one for all, since each stream that computes has workspaces of its own."""


class CudaGraphCapture:
    """CUDA graphs that share one memory pool. All captures on a device share one stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device not in _STREAMS:
            _STREAMS[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.stream = _STREAMS[device]
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
        """Capture the run on a side stream. Other threads may go on using CUDA meanwhile. If it fails, CUDA is as it was before."""
        graph = torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle() if self._pool is None else self._pool
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            try:
                result = self._captured(graph, pool, run)
            except BaseException:
                self._mend(pool)
                raise
        self._pool = pool
        return result, graph.replay

    def _captured(self, graph: Any, pool: Any, run: Callable[[], T]) -> T:
        """Run between the beginning and the end of a capture, both on the capture stream."""
        with torch.cuda.stream(self.stream):  # restores the stream even if the end of the capture raises
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                result = run()
            except BaseException:
                with suppress(RuntimeError):  # the capture was invalidated: the error of the run says more
                    graph.capture_end()
                raise
            graph.capture_end()
        return result

    def _mend(self, pool: Any) -> None:
        """End allocations to the pool of a failed capture, and take generators out of capture mode by a capture that succeeds."""
        end_allocations(self.device, pool, is_shared=self._pool is not None)
        with suppress(RuntimeError), warnings.catch_warnings(), torch.cuda.stream(self.stream):
            warnings.simplefilter("ignore")  # the graph is empty
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
            graph.capture_end()

    def drain(self) -> None:
        """Synchronize with the device."""
        torch.cuda.synchronize(self.device)
