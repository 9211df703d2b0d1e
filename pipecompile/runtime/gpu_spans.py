"""Times of cells on GPUs: two events around each cell on its compute stream, read when the timeline is first used.

    fork     origin on GPU 0 ──► waited for by GPU 1, origin there          on idle streams: one moment, up to the time of a signal
    1F0      start ■ kernels ■ end                                          seconds from the origin of its own GPU

The host launches and does not wait, so its own clock says when a cell was launched, not when it ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from pipecompile.runtime.profiler_ranges import in_range, timed
from pipecompile.runtime.registers import Frame, Run, Spans
from pipecompile.torch_private.accelerators import is_accelerator

__all__ = ["GpuMoment", "mark_origins", "on_gpu", "seconds_of", "timed_cell", "timed_on_gpu"]


@dataclass(frozen=True, slots=True)
class GpuMoment:
    """A moment on a GPU: an event, the origin of the run on the same GPU, and the host's time when that was recorded, in seconds."""

    origin: Any
    event: Any
    begun: float

    @property
    def seconds(self) -> float:
        """The moment on the clock of the host. Waits for the event, and for the origin: torch gives a stream to several users."""
        self.event.synchronize()
        self.origin.synchronize()
        return self.begun + float(self.origin.elapsed_time(self.event)) / 1000


def mark_origins(frame: Frame, devices: Sequence[torch.device]) -> None:
    """Record the origin of a run on each GPU, at one moment: each waits for the first, on streams that do nothing else.

    Streams and events are those of the frame's last run.
    """
    first = None
    frame.events["begun"] = perf_counter()
    for device in dict.fromkeys(devices):
        if is_accelerator(device):
            stream = frame.events.get(("clock", device)) or torch.Stream(device)
            frame.events["clock", device] = stream
            if first is not None:
                stream.wait_event(first)
            origin = frame.events.get(("origin", device)) or _timing_event(device)
            frame.events["origin", device] = origin
            origin.record(stream)
            first = first or origin


def on_gpu(run: Run, device: torch.device) -> Run:
    """Return the function of a cell with `device` as the current GPU."""

    def run_there(frame: Frame) -> None:
        with torch.accelerator.device_index(device.index):
            run(frame)

    return run_there


def timed_on_gpu(run: Run, index: int, name: str, device: torch.device) -> Run:
    """Return the function of a cell on pipeline device `index`, with events before and after it on the current stream of its GPU."""

    def timed(frame: Frame) -> None:
        stream = torch.accelerator.current_stream(device)
        start, end = frame.events.setdefault((index, name), None) or (_timing_event(device), _timing_event(device))
        frame.events[index, name] = start, end
        start.record(stream)
        run(frame)
        end.record(stream)
        origin, begun = frame.events["origin", device], frame.events["begun"]
        frame.spans.append((index, name, GpuMoment(origin, start, begun), GpuMoment(origin, end, begun)))

    return timed


def timed_cell(run: Run, index: int, name: str, device: torch.device, *, is_launched: bool) -> Run:
    """Return the function of a cell, which notes its times, on an accelerator as the current one: by events if it `is_launched`."""
    if not is_accelerator(device):
        return timed(run, index, name)
    there = timed_on_gpu(in_range(run, name), index, name, device) if is_launched else timed(run, index, name)
    return on_gpu(there, device)


def seconds_of(spans: Spans) -> list[tuple[int, str, float, float]]:
    """Return the times of cells in seconds of one clock. Waits for the GPUs if they are not through."""
    return [(device, name, _seconds(start), _seconds(end)) for device, name, start, end in spans]


def _seconds(moment: Any) -> float:
    return moment.seconds if isinstance(moment, GpuMoment) else moment


def _timing_event(device: torch.device) -> Any:
    return torch.Event(device, enable_timing=True)
