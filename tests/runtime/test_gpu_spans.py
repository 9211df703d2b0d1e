"""Times of cells by events, on pretended GPUs that run behind the host, each with a clock of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipecompile.ir.timeline import Timeline
from pipecompile.runtime.dispatch import Dispatcher
from pipecompile.runtime.gpu_spans import GpuMoment, mark_origins, seconds_of, timed_on_gpu
from pipecompile.runtime.registers import Frame

GPUS = torch.device("cuda:0"), torch.device("cuda:1")


class Stream:
    """A stream of a GPU, which is busy until `now`."""

    def __init__(self, device: torch.device, now: float = 0.0) -> None:
        self.device, self.now = device, now

    def wait_event(self, event: Any) -> None:
        self.now = max(self.now, event.true)


class Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.stream: Stream | None = None
        self.waited = 0

    def record(self, stream: Stream) -> None:
        self.stream, self.true = stream, stream.now

    def synchronize(self) -> None:
        self.waited += 1

    def elapsed_time(self, end: Event) -> float:
        assert self.stream is not None
        assert end.stream is not None
        assert end.stream.device == self.stream.device, "clocks of two GPUs cannot be compared"
        return 1e3 * (end.true - self.true)


def test_spans_of_all_gpus_are_on_one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, `pipe.measured` had the host's time: that of launching."""
    streams = {GPUS[0]: Stream(GPUS[0], 5.0), GPUS[1]: Stream(GPUS[1], 2.0)}
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: streams[device])
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch, "Event", Event)

    def cell(device: int, seconds: float) -> Any:
        def run(_: Frame) -> None:
            streams[GPUS[device]].now += seconds

        return timed_on_gpu(run, device, f"{device}F0", GPUS[device])

    frame = Frame([], [])
    cells = [cell(0, 3.0), cell(1, 4.0)]
    for _ in range(2):
        frame.spans = []
        mark_origins(frame, GPUS)
        for run in cells:
            run(frame)
    timeline = Timeline.measured(seconds_of(frame.spans), 2)
    assert [(s.name, round(s.start, 6), round(s.end, 6)) for s in timeline.spans] == [
        ("0F0", 2.0, 5.0),
        ("1F0", 0.0, 4.0),
    ], "GPU 0 was busy until 8 and GPU 1 until 6, when the second run began"
    events = [value for value in frame.events.values() if isinstance(value, (Event, tuple))]
    assert len(events) == 4, "the second run records the events of the first again"
    assert all(event.waited for event in events if isinstance(event, Event)), "origins are over as well"


def test_times_of_the_host_stay_as_they_are() -> None:
    assert seconds_of([(0, "0F0", 1.0, 2.5)]) == [(0, "0F0", 1.0, 2.5)]


def test_dispatch_on_gpus_needs_no_times() -> None:
    dispatcher = Dispatcher("auto", GPUS)
    moment = GpuMoment(None, None, 0.0)
    dispatcher.settle([(0, "0F0", moment, moment)], is_ordered=False)
    assert dispatcher.choice == "inline"
