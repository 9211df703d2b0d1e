"""Streams and events, reduced to the operations that a program needs: run, record, wait, fork. The tests emulate them.

The compute stream of a device is the stream that is current there. Copies between two GPUs have a stream on either side, and
both are made current, since `Tensor.to` synchronizes with the current streams of both devices. Copies from the host have a
stream on the device, and so have copies of what forwards saved, to the host and back.

A receive buffer is a register that the copy writes. It keeps its tensor until the next copy into it, which waits for the last reader
first, or until the end of the run, since the next run forks first: so the memory returns to the stream of the copies in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from pipecompile.ir import HOST, Op
from pipecompile.runtime.gpu_spans import mark_origins
from pipecompile.runtime.received_memory import copying_views
from pipecompile.runtime.registers import Frame, Run
from pipecompile.runtime.stream_events import Lane, Launch, Place
from pipecompile.runtime.transport import ABORT, Aborted, Link, Upload, link
from pipecompile.torch_private.accelerators import OnStreams, is_accelerator

__all__ = [
    "CopyStream",
    "DeviceStreams",
    "HostStream",
    "Stream",
    "StreamTask",
    "Streams",
    "allocated",
    "launched",
]


@dataclass(frozen=True, slots=True)
class StreamTask:
    """An instruction as a function of the frame, with its place and the registers that it reads and writes.

    `received` are those of the read registers whose values are in receive buffers.
    """

    place: Place
    op: Op
    run: Run
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    received: tuple[int, ...] = ()


class Stream(Protocol):
    """A queue of work that a device does in order."""

    def run(self, task: StreamTask, frame: Frame) -> None:
        """Launch the task."""

    def record(self, event: Any) -> Any:
        """Return an event that occurs when the work launched so far is done: `event` once more, a new one for None."""

    def wait(self, event: Any) -> None:
        """Let work launched from now on begin after the event."""


class Streams(Protocol):
    """The streams of all devices, and the links between them."""

    def apart(self, source: int, target: int) -> bool:
        """Return whether copies from one device to another have a stream of their own."""

    def stream(self, lane: Lane) -> Stream:
        """Return the stream of a lane."""

    def link(self, source: int, target: int) -> Link:
        """Return the link from one device, or from HOST, to another."""

    def fork(self, frame: Frame) -> None:
        """Begin a run: copies launched from now on wait for the devices' present work, and times count from now."""

    def join(self) -> None:
        """End a successful run, before its buffers are freed: work that the caller launches from now on waits for the run."""

    def finish(self) -> None:
        """Return when everything launched is over: after a run that failed."""

    def release(self, index: int) -> Callable[[torch.Tensor], None]:
        """Return a function after which the memory of a tensor, once free, is reused when the compute of a device is over."""

    def allocator(self, index: int) -> Callable[[int], torch.Tensor]:
        """Return a function that allocates a number of bytes on a device, in memory of its compute, whatever stream is current."""


def launched(
    task: StreamTask, launch: Launch, stream: Stream | None, follows: Sequence[int] = (), followers: Sequence[int] = ()
) -> Run:
    """Return the function that launches a task on its stream: wait, run, record. Without a stream, the host runs it at once.

    In threads, `follows` are the channels of launches of other devices that come before, and `followers` those of
    launches that come after this one: a launch waits for an event only when that has been recorded.
    """
    if task.op is Op.COMPUTE and task.received:
        task = replace(task, run=copying_views(task.run, task.received, task.writes))

    def run(frame: Frame) -> None:
        for channel in follows:
            if frame.channels[channel].get() is ABORT:
                raise Aborted
        if stream is None:
            task.run(frame)
            return
        for before in launch.waits:
            stream.wait(frame.events[before])
        stream.run(task, frame)
        if launch.is_awaited:
            frame.events[task.place] = stream.record(frame.events.get(task.place))
        for channel in followers:
            frame.channels[channel].put(None)

    return run


def released_to(device: torch.device) -> Callable[[torch.Tensor], None]:
    """Return a function after which the memory of a tensor, once free, is reused when the compute of `device` is over."""

    def release(tensor: torch.Tensor) -> None:
        if is_accelerator(tensor.device):
            tensor.record_stream(torch.accelerator.current_stream(device))

    return release


def allocated(nbytes: int, stream: Any) -> torch.Tensor:
    """Return `nbytes` bytes on the device of a stream, in memory that is reused in the order of that stream."""
    with OnStreams(stream):
        return torch.empty(nbytes, dtype=torch.uint8, device=stream.device)


class DeviceStreams:
    """Streams of real devices: copies between two different GPUs, and from the host to a GPU, run beside compute."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)
        self._lanes: dict[Lane, Stream] = {}
        self._current: dict[torch.device, Any] = {}

    @property
    def overlap(self) -> bool:
        """Whether any copies between devices run beside compute."""
        return len({device for device in self.devices if is_accelerator(device)}) > 1

    @property
    def is_asynchronous(self) -> bool:
        """Whether any device works beside the host."""
        return any(map(is_accelerator, self.devices))

    def apart(self, source: int, target: int) -> bool:
        """Return whether these are two different GPUs, or the host and a GPU."""
        if source == HOST:
            return is_accelerator(self.devices[target])
        one, other = self.devices[source], self.devices[target]
        return one != other and is_accelerator(one) and is_accelerator(other)

    def stream(self, lane: Lane) -> Stream:
        """Return the stream of a lane, a new one at the first request."""
        if lane not in self._lanes:
            source, target = lane
            self._lanes[lane] = self._compute(target) if source == target else self._copies(source, target)
        return self._lanes[lane]

    def _compute(self, index: int) -> Stream:
        device = self.devices[index]
        return _ComputeStream(device) if is_accelerator(device) else HostStream()

    def _copies(self, source: int, target: int) -> Stream:
        return CopyStream([self.devices[end] for end in (source, target) if end >= 0])

    def link(self, source: int, target: int) -> Link:
        """Return the link from one device, or from HOST, to another."""
        if source == HOST:
            return Upload(self.devices[target])
        return link(self.devices[source], self.devices[target])

    def fork(self, frame: Frame) -> None:
        mark_origins(frame, self.devices)
        self._current = {one: torch.accelerator.current_stream(one) for one in self.devices if is_accelerator(one)}
        DeviceStreams.join(self)

    def join(self) -> None:
        """Let copies wait for what the devices compute now, on the streams of the caller: the buffers that compute reads return to the
        streams of the copies, and torch gives a stream to several users.
        """
        for stream in self._lanes.values():
            if isinstance(stream, CopyStream):
                stream.fork()

    def release(self, index: int) -> Callable[[torch.Tensor], None]:
        """Return the release of memory that the compute of device `index` reads."""
        return released_to(self.devices[index])

    def allocator(self, index: int) -> Callable[[int], torch.Tensor]:
        """Return a function that allocates bytes in memory of the compute of device `index`, as the last `fork` found its stream."""
        return lambda nbytes: allocated(nbytes, self._current[self.devices[index]])

    def finish(self) -> None:
        for device in dict.fromkeys(self.devices):
            if is_accelerator(device):
                torch.accelerator.synchronize(device)


class HostStream:
    """The CPU: work is done when `run` returns."""

    def run(self, task: StreamTask, frame: Frame) -> None:
        task.run(frame)

    def record(self, event: Any) -> None:  # noqa: ARG002 nothing to record
        return None

    def wait(self, event: Any) -> None:
        """Return at once: all work is done."""


class _ComputeStream:
    """The stream that is current on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def run(self, task: StreamTask, frame: Frame) -> None:
        task.run(frame)

    def record(self, event: Any) -> Any:
        return torch.accelerator.current_stream(self.device).record_event(event)

    def wait(self, event: Any) -> None:
        torch.accelerator.current_stream(self.device).wait_event(event)


class CopyStream:
    """Streams of the copies from one place to another: one on each GPU at its ends."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)
        self.ends = tuple(torch.Stream(device) for device in devices)

    def run(self, task: StreamTask, frame: Frame) -> None:
        with OnStreams(*self.ends):
            task.run(frame)

    def record(self, event: Any) -> Any:
        return self.ends[-1].record_event(event)

    def wait(self, event: Any) -> None:
        for end in self.ends:
            end.wait_event(event)

    def fork(self) -> None:
        """Wait for what the devices at the ends compute now."""
        for end in self.ends:
            for device in self.devices:
                end.wait_stream(torch.accelerator.current_stream(device))
