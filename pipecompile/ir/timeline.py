"""What happened when, on which device: predicted by the simulator or measured by the interpreter, in one form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipecompile.ir.notebook_html import html_of

__all__ = ["Span", "Timeline"]

COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class Span:
    """One bar of the picture: `name` is an action (2F0) on track "compute", or a transfer on a copy track ("to 2")."""

    device: int
    track: str
    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans in seconds (or in the unit of the costs given), and per device a memory curve of (time, bytes) steps.

    `peak_in_flight[d]` is the largest number of micro-batches whose forward ran on device d and whose backward had not,
    a stage counting 1/(number of stages on d). `critical_path` is a chain of spans, each waiting for the one before, that is
    as long as the makespan; a measured timeline has none.
    """

    n_devices: int
    spans: tuple[Span, ...]
    memory: tuple[tuple[tuple[float, float], ...], ...] = ()
    peak_in_flight: tuple[float, ...] = ()
    critical_path: tuple[Span, ...] = ()

    @classmethod
    def measured(cls, spans: Sequence[tuple[int, str, float, float]], n_devices: int) -> Timeline:
        """What ran: (device, action, start, end) of compute instructions, in seconds of any clock."""
        origin = min((start for _, _, start, _ in spans), default=0.0)
        bars = tuple(Span(device, COMPUTE, name, start - origin, end - origin) for device, name, start, end in spans)
        return cls(n_devices, bars)

    def compute(self, device: int) -> list[Span]:
        """The device's compute spans in order of their start."""
        return sorted((s for s in self.spans if s.device == device and s.track == COMPUTE), key=lambda s: s.start)

    @property
    def makespan(self) -> float:
        """From the first start to the last end, over all devices and tracks."""
        return max((s.end for s in self.spans), default=0.0) - min((s.start for s in self.spans), default=0.0)

    @property
    def spans_of_devices(self) -> tuple[float, ...]:
        """Per device from its first compute's start to its last one's end; 0 for one that computes nothing."""
        first, last = [math.inf] * self.n_devices, [-math.inf] * self.n_devices
        for span in self.spans:
            if span.track == COMPUTE:
                first[span.device] = min(first[span.device], span.start)
                last[span.device] = max(last[span.device], span.end)
        return tuple(max(0.0, b - a) for a, b in zip(first, last, strict=True))

    @property
    def span(self) -> float:
        """The longest first-start-to-last-end of any one device's compute ("zero bubble" papers report this)."""
        return max(self.spans_of_devices, default=0.0)

    @property
    def busy(self) -> float:
        """Compute time summed over devices."""
        return sum(s.end - s.start for s in self.spans if s.track == COMPUTE)

    @property
    def bubble(self) -> float:
        """1 - busy / (devices x makespan)."""
        total = self.n_devices * self.makespan
        return 1.0 - self.busy / total if total else 0.0

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """The highest point of each device's memory curve, bytes."""
        return tuple(max((size for _, size in curve), default=0.0) for curve in self.memory)

    def _repr_html_(self) -> str | None:
        return html_of(self)
