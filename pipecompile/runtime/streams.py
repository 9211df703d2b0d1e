"""Streams and events, reduced to the three operations that a program needs: run, record, wait. The tests emulate them.

The compute stream of a device is the stream that is current there. Copies between two GPUs have a stream on either side, and
both are made current, since `Tensor.to` synchronizes with the current streams of both devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from pipecompile.ir import Op
from pipecompile.runtime.registers import Frame, Run
from pipecompile.runtime.stream_events import Lane, Launch, Place
from pipecompile.runtime.transport import Link, link

__all__ = ["DeviceStreams", "Stream", "StreamTask", "Streams", "launched"]


@dataclass(frozen=True, slots=True)
class StreamTask:
    """An instruction as a function of the frame, with its place and the registers that it reads and writes."""

    place: Place
    op: Op
    run: Run
    reads: tuple[int, ...]
    writes: tuple[int, ...]


class Stream(Protocol):
    """A queue of work that a device does in order."""

    def run(self, task: StreamTask, frame: Frame) -> None:
        """Launch the task."""

    def record(self) -> Any:
        """Return an event that occurs when the work launched so far is done."""

    def wait(self, event: Any) -> None:
        """Let work launched from now on begin after the event."""


class Streams(Protocol):
    """The streams of all devices, and the links between them."""

    def apart(self, source: int, target: int) -> bool:
        """Return whether copies from one device to another have a stream of their own."""

    def stream(self, lane: Lane) -> Stream:
        """Return the stream of a lane."""

    def link(self, source: int, target: int) -> Link:
        """Return the link from one device to another."""


def launched(task: StreamTask, launch: Launch, stream: Stream) -> Run:
    """Return the function that launches a task on its stream: wait, run, record."""
    if task.op is Op.COMPUTE:
        task = replace(task, run=_copying_views(task))

    def run(frame: Frame) -> None:
        for before in launch.waits:
            stream.wait(frame.events[before])
        stream.run(task, frame)
        if launch.is_awaited:
            frame.events[task.place] = stream.record()

    return run


def _copying_views(task: StreamTask) -> Run:
    """Return the task's function, copying outputs that are views of received inputs: that memory is returned to the copies."""

    def run(frame: Frame) -> None:
        received = {_memory(frame.registers[index]) for index in task.reads} - {None}
        task.run(frame)
        for index in task.writes:
            value = frame.registers[index]
            if _memory(value) in received:
                frame.registers[index] = value.detach().clone().requires_grad_(value.requires_grad)

    return run


def _memory(value: Any) -> int | None:
    is_plain = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return value.untyped_storage().data_ptr() or None if is_plain else None


class DeviceStreams:
    """Streams of real devices: copies between two different GPUs run beside compute, all else in the order of compute."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)
        self._lanes: dict[Lane, Stream] = {}

    @property
    def overlap(self) -> bool:
        """Whether any copies run beside compute."""
        return len({device for device in self.devices if device.type == "cuda"}) > 1

    def apart(self, source: int, target: int) -> bool:
        """Return whether these are two different GPUs."""
        one, other = self.devices[source], self.devices[target]
        return one != other and one.type == other.type == "cuda"

    def stream(self, lane: Lane) -> Stream:
        """Return the stream of a lane, a new one at the first request."""
        if lane not in self._lanes:
            source, target = (self.devices[end] for end in lane)
            compute = _ComputeStream(source) if source.type == "cuda" else _HostStream()
            self._lanes[lane] = compute if lane[0] == lane[1] else _CopyStream(source, target)
        return self._lanes[lane]

    def link(self, source: int, target: int) -> Link:
        """Return the link from one device to another."""
        return link(self.devices[source], self.devices[target])


class _HostStream:
    """The CPU: work is done when `run` returns."""

    def run(self, task: StreamTask, frame: Frame) -> None:
        task.run(frame)

    def record(self) -> None:
        return None

    def wait(self, event: Any) -> None:
        """Return at once: all work is done."""


class _ComputeStream:
    """The stream that is current on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def run(self, task: StreamTask, frame: Frame) -> None:
        task.run(frame)

    def record(self) -> Any:
        return torch.cuda.current_stream(self.device).record_event()

    def wait(self, event: Any) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)


class _CopyStream:
    """A pair of streams for copies from one GPU to another, one stream on each."""

    def __init__(self, source: torch.device, target: torch.device) -> None:
        self.ends = torch.cuda.Stream(source), torch.cuda.Stream(target)  # type: ignore[no-untyped-call]

    def run(self, task: StreamTask, frame: Frame) -> None:
        with ExitStack() as stack:
            for end in self.ends:
                stack.enter_context(torch.cuda.stream(end))
            task.run(frame)

    def record(self) -> Any:
        return self.ends[1].record_event()

    def wait(self, event: Any) -> None:
        for end in self.ends:
            end.wait_event(event)
