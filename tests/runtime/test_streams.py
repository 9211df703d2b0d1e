"""Launches on streams: waits before, an event after, and copies of outputs that are views of received memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipecompile.ir import HOST, Op
from pipecompile.runtime.registers import Frame
from pipecompile.runtime.stream_events import Launch
from pipecompile.runtime.streams import DeviceStreams, StreamTask, launched

CPU, GPUS = torch.device("cpu"), (torch.device("cuda:0"), torch.device("cuda:1"))


class Noting:
    """A stream that notes what it is given."""

    def __init__(self) -> None:
        self.notes: list[Any] = []

    def run(self, task: StreamTask, frame: Frame) -> None:
        self.notes.append("run")
        task.run(frame)

    def record(self, event: object) -> str:
        self.notes.append("record")
        return "event"

    def wait(self, event: Any) -> None:
        self.notes.append(event)


def test_a_launch_waits_runs_and_records() -> None:
    stream, frame = Noting(), Frame([], [])
    frame.events[0, 3] = "earlier"
    task = StreamTask((1, 2), Op.SEND, lambda _: None, (), ())
    launched(task, Launch((1, 1), ((0, 3),), True), stream)(frame)
    assert stream.notes == ["earlier", "run", "record"]
    assert frame.events[1, 2] == "event"


def test_no_event_is_recorded_that_no_launch_waits_for() -> None:
    stream = Noting()
    launched(StreamTask((0, 0), Op.SEND, lambda _: None, (), ()), Launch((0, 0)), stream)(Frame([], []))
    assert stream.notes == ["run"]


def test_an_output_that_is_a_view_of_an_input_gets_memory_of_its_own() -> None:
    def compute(frame: Frame) -> None:
        frame.registers[1], frame.registers[2] = frame.registers[0].view(2, 2), torch.ones(2)

    frame = Frame([torch.arange(4.0), None, None], [])
    launched(StreamTask((0, 0), Op.COMPUTE, compute, (0,), (1, 2), (0,)), Launch((0, 0)), Noting())(frame)
    received, view, own = frame.registers
    assert torch.equal(view, received.view(2, 2))
    assert view.untyped_storage().data_ptr() != received.untyped_storage().data_ptr()
    assert torch.equal(own, torch.ones(2))


class Pretended:
    """A stream that notes what it waits for."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.notes = device, list[Any]()

    def wait_stream(self, other: Any) -> None:
        self.notes.append(other)

    def wait_event(self, event: Any) -> None:
        self.notes.append(event)

    def record_event(self, event: Any) -> Any:
        return event or object()


def test_before_a_run_copies_wait_for_what_their_ends_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of the buffers of the run before is free again: what read it there is launched, and may not be over."""
    current = {gpu: f"compute of {gpu}" for gpu in GPUS}
    monkeypatch.setattr(torch, "Stream", Pretended)
    monkeypatch.setattr(torch.accelerator, "current_stream", current.__getitem__)
    streams = DeviceStreams(GPUS)
    between, upload = streams.stream((0, 1)), streams.stream((HOST, 1))
    monkeypatch.setattr("pipecompile.runtime.streams.mark_origins", lambda *_: None)
    streams.fork(Frame([], []))
    assert [end.notes for end in between.ends] == [list(current.values())] * 2  # type: ignore[attr-defined]
    assert [end.notes for end in upload.ends] == [[current[GPUS[1]]]]  # type: ignore[attr-defined]
    event = between.record(None)
    assert between.record(event) is event
    upload.wait(event)
    assert upload.ends[0].notes[-1] is event  # type: ignore[attr-defined]


def test_after_a_run_copies_wait_for_what_reads_their_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffers are free then, on the streams of the copies. Torch has 32 streams, so a stream of the caller's may be one of these:
    what the caller copied there was written over what the last cells read.
    """
    monkeypatch.setattr(torch, "Stream", Pretended)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda gpu: f"compute of {gpu}")
    streams = DeviceStreams(GPUS)
    between = streams.stream((0, 1))
    streams.join()
    assert [end.notes for end in between.ends] == [[f"compute of {gpu}" for gpu in GPUS]] * 2  # type: ignore[attr-defined]


def test_only_two_different_gpus_copy_beside_compute() -> None:
    streams = DeviceStreams((CPU, *GPUS, GPUS[0]))
    apart = {(a, b) for a in range(4) for b in range(4) if streams.apart(a, b)}
    assert apart == {(1, 2), (2, 1), (2, 3), (3, 2)}
    assert [streams.apart(HOST, d) for d in range(4)] == [False, True, True, True]
    assert streams.overlap
    assert not DeviceStreams((CPU, GPUS[0])).overlap


def test_a_lane_keeps_its_stream() -> None:
    streams = DeviceStreams((CPU, CPU))
    assert streams.stream((0, 0)) is streams.stream((0, 0))
    assert streams.stream((0, 0)).record(None) is None
