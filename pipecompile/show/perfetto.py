"""Timelines as Chrome-trace JSON, for https://ui.perfetto.dev.

A process per device and a thread per track, the measured one directly below the predicted one, both from time 0; two
memory counters; and one arrow per value that crosses devices:

    the compute that writes it  ->  its transfer  ->  the first compute that reads it on the other device
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from pipecompile.ir import Kind, Op, Program
from pipecompile.ir.timeline import COMPUTE, Span, Timeline
from pipecompile.ir.views import register_writer

__all__ = ["timeline_trace"]

_Event = dict[str, object]

_CATEGORIES = {f"{kind.value}": kind.name.lower().replace("_", " ") for kind in Kind}


@dataclass(frozen=True, slots=True)
class _Layer:
    """One of the two timelines: its label, its start, and the thread of each track."""

    label: str
    timeline: Timeline
    origin: float
    threads: Mapping[tuple[int, str], int]

    def thread(self, span: Span) -> _Event:
        return {"pid": span.device, "tid": self.threads[span.device, span.track]}

    def microseconds(self, moment: float) -> float:
        return round((moment - self.origin) * 1e6, 3)


def timeline_trace(
    predicted: Timeline,
    measured: Timeline | None = None,
    *,
    program: Program | None = None,
    devices: Sequence[str] = (),
) -> str:
    """Return the trace as JSON text. Times are seconds. With `program`, transfers have arrows.

    `devices` are the names of the processes, by default "device 0" and so on.
    """
    timelines = {"predicted": predicted} | ({} if measured is None else {"measured": measured})
    layers = _layers(timelines)
    n_devices = max(timeline.n_devices for timeline in timelines.values())
    events = [*_process_names(n_devices, devices)]
    for layer in layers:
        events += [*_thread_names(layer), *_slices(layer), *_memory(layer)]
    if program is not None:
        events += [*_arrows(layers, program)]
    figures = {label: {"makespan_s": t.makespan, "bubble": t.bubble} for label, t in timelines.items()}
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms", "otherData": figures}).decode()


def _layers(timelines: Mapping[str, Timeline]) -> list[_Layer]:
    """Number the threads of every device: compute first, then other tracks by name; predicted before measured."""
    tracks = {(s.device, s.track) for timeline in timelines.values() for s in timeline.spans}
    order = sorted(tracks, key=lambda key: (key[0], key[1] != COMPUTE, key[1]))
    return [
        _Layer(label, t, _origin(t), {key: len(timelines) * i + k + 1 for i, key in enumerate(order)})
        for k, (label, t) in enumerate(timelines.items())
    ]


def _origin(timeline: Timeline) -> float:
    moments = [s.start for s in timeline.spans] + [moment for curve in timeline.memory for moment, _ in curve]
    return min(moments, default=0.0)


def _process_names(n_devices: int, devices: Sequence[str]) -> Iterator[_Event]:
    for device in range(n_devices):
        name = f"device {device}" + (f" · {devices[device]}" if device < len(devices) else "")
        yield {"ph": "M", "name": "process_name", "pid": device, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": device, "args": {"sort_index": device}}


def _thread_names(layer: _Layer) -> Iterator[_Event]:
    for device, track in sorted({(s.device, s.track) for s in layer.timeline.spans}):
        thread = {"pid": device, "tid": layer.threads[device, track]}
        yield {"ph": "M", "name": "thread_name", **thread, "args": {"name": f"{track} · {layer.label}"}}
        yield {"ph": "M", "name": "thread_sort_index", **thread, "args": {"sort_index": thread["tid"]}}


def _slices(layer: _Layer) -> Iterator[_Event]:
    for span in layer.timeline.spans:
        start = layer.microseconds(span.start)
        kind = next((letter for letter in _CATEGORIES if letter in span.name), "")
        category = _CATEGORIES.get(kind, COMPUTE) if span.track == COMPUTE else "transfer"
        duration = round(layer.microseconds(span.end) - start, 3)
        yield {"ph": "X", "name": span.name, "cat": category, "ts": start, "dur": duration, **layer.thread(span)}


def _memory(layer: _Layer) -> Iterator[_Event]:
    for device, curve in enumerate(layer.timeline.memory):
        for moment, size in curve:
            time = layer.microseconds(moment)
            yield {"ph": "C", "name": f"memory · {layer.label}", "pid": device, "ts": time, "args": {"bytes": size}}


def _arrows(layers: Sequence[_Layer], program: Program) -> Iterator[_Event]:
    """Yield a flow per value and receiving device. Its points are in the middle of the spans, so each binds to one
    slice.
    """
    journeys = ((layer, spans) for layer in layers for spans in _journeys(layer.timeline, program))
    for number, (layer, spans) in enumerate(journeys):
        for position, span in enumerate(spans):
            phase = "s" if position == 0 else "f" if position == len(spans) - 1 else "t"
            time = layer.microseconds((span.start + span.end) / 2)
            event = {"ph": phase, "name": "transfer", "cat": "transfer", "id": number, "ts": time}
            yield event | layer.thread(span) | ({"bp": "e"} if phase == "f" else {})


def _journeys(timeline: Timeline, program: Program) -> Iterator[list[Span]]:
    """Yield the spans that a value passes, for every transfer whose writer or reader is in the timeline."""
    writers, readers = _ends(program)
    compute = {(s.device, s.name): s for s in timeline.spans if s.track == COMPUTE}
    for transfer in timeline.spans:
        if not transfer.track.startswith("to "):
            continue
        receiver = transfer.track.removeprefix("to ")
        device = int(receiver) if receiver.isdigit() else -1
        for value in transfer.name.split():
            ends = (
                (transfer.device, writers.get((transfer.device, value), "")),
                (device, readers.get((device, value), "")),
            )
            journey = [compute.get(ends[0]), transfer, compute.get(ends[1])]
            known = [span for span in journey if span is not None]
            if len(known) > 1:
                yield known


def _ends(program: Program) -> tuple[dict[tuple[int, str], str], dict[tuple[int, str], str]]:
    """Return, per (device, value), the action that writes it and the first action that reads it."""
    writers: dict[tuple[int, str], str] = {}
    readers: dict[tuple[int, str], str] = {}
    for device, row in enumerate(program.rows):
        for instruction in row:
            if instruction.op is Op.COMPUTE:
                for operand in instruction.writes:
                    writers[device, str(operand.value)] = str(instruction.action)
                for operand in instruction.reads:
                    readers.setdefault((device, str(operand.value)), str(instruction.action))
    return writers, readers


register_writer("trace", timeline_trace)
