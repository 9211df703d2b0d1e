"""Streams and events, as few of their verbs as a program needs: run, record, wait. CUDA's here; the tests emulate others.

The compute stream of a device is whatever stream is current there. Copies between two GPUs have a stream on either side, both
made current, since `Tensor.to` synchronises with the current streams of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from pipecompile.ir import Op
from pipecompile.runtime.registers import Frame
from pipecompile.runtime.stream_events import Lane, Launch, Place
from pipecompile.runtime.transport import Link, link

__all__ = ["Act", "DeviceStreams", "Stream", "Streams", "launched"]

Run = Callable[[Frame], None]


@dataclass(frozen=True, slots=True)
class Act:
    """An instruction as a function of the frame: where it is, and the registers that it reads and writes."""

    place: Place
    op: Op
    run: Run
    reads: tuple[int, ...]
    writes: tuple[int, ...]


class Stream(Protocol):
    """Work in the order in which it was given."""

    def run(self, act: Act, frame: Frame) -> None: ...

    def record(self) -> Any:
        """An event: all that was given so far is over."""

    def wait(self, event: Any) -> None:
        """What is given from now on runs after the event."""


class Streams(Protocol):
    """The streams of all devices, and how values are copied between them."""

    def apart(self, source: int, target: int) -> bool: ...

    def stream(self, lane: Lane) -> Stream: ...

    def link(self, source: int, target: int) -> Link: ...


def launched(act: Act, launch: Launch, stream: Stream) -> Run:
    """The instruction as the host sees it: wait, run, record."""
    if act.op is Op.COMPUTE:
        act = replace(act, run=_in_memory_of_its_own(act))

    def launch_it(frame: Frame) -> None:
        for before in launch.waits:
            stream.wait(frame.events[before])
        stream.run(act, frame)
        if launch.is_awaited:
            frame.events[act.place] = stream.record()

    return launch_it


def _in_memory_of_its_own(act: Act) -> Run:
    """What a stage hands on may be a view of what it received: that memory goes back to the copies, so it is copied."""

    def run(frame: Frame) -> None:
        received = {_memory(frame.registers[index]) for index in act.reads} - {None}
        act.run(frame)
        for index in act.writes:
            value = frame.registers[index]
            if _memory(value) in received:
                frame.registers[index] = value.detach().clone().requires_grad_(value.requires_grad)

    return run


def _memory(value: Any) -> int | None:
    is_plain = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return value.untyped_storage().data_ptr() or None if is_plain else None


class DeviceStreams:
    """Those of real devices: copies between two different GPUs run beside compute, all else in the order of compute."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)
        self._lanes: dict[Lane, Stream] = {}

    @property
    def overlap(self) -> bool:
        """Do any copies run beside compute?"""
        return len({device for device in self.devices if device.type == "cuda"}) > 1

    def apart(self, source: int, target: int) -> bool:
        one, other = self.devices[source], self.devices[target]
        return one != other and one.type == other.type == "cuda"

    def stream(self, lane: Lane) -> Stream:
        if lane not in self._lanes:
            source, target = (self.devices[end] for end in lane)
            compute = _ComputeStream(source) if source.type == "cuda" else _HostStream()
            self._lanes[lane] = compute if lane[0] == lane[1] else _CopyStream(source, target)
        return self._lanes[lane]

    def link(self, source: int, target: int) -> Link:
        return link(self.devices[source], self.devices[target])


class _HostStream:
    """A CPU has done what it was given."""

    def run(self, act: Act, frame: Frame) -> None:
        act.run(frame)

    def record(self) -> None:
        return None

    def wait(self, event: Any) -> None:
        """There is nothing to wait for."""


class _ComputeStream:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def run(self, act: Act, frame: Frame) -> None:
        act.run(frame)

    def record(self) -> Any:
        return torch.cuda.current_stream(self.device).record_event()

    def wait(self, event: Any) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)


class _CopyStream:
    def __init__(self, source: torch.device, target: torch.device) -> None:
        self.ends = torch.cuda.Stream(source), torch.cuda.Stream(target)  # type: ignore[no-untyped-call]

    def run(self, act: Act, frame: Frame) -> None:
        with ExitStack() as stack:
            for end in self.ends:
                stack.enter_context(torch.cuda.stream(end))
            act.run(frame)

    def record(self) -> Any:
        return self.ends[1].record_event()

    def wait(self, event: Any) -> None:
        for end in self.ends:
            end.wait_event(event)
