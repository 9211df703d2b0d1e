"""What happened when, on which device: predicted by the simulator or measured by the interpreter, in one form."""

from __future__ import annotations

from dataclasses import dataclass

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
    a stage counting 1/(number of stages on d).
    """

    n_devices: int
    spans: tuple[Span, ...]
    memory: tuple[tuple[tuple[float, float], ...], ...] = ()
    peak_in_flight: tuple[float, ...] = ()

    def compute(self, device: int) -> list[Span]:
        """The device's compute spans in order of their start."""
        return sorted((s for s in self.spans if s.device == device and s.track == COMPUTE), key=lambda s: s.start)

    @property
    def makespan(self) -> float:
        """From the first start to the last end, over all devices and tracks."""
        return max((s.end for s in self.spans), default=0.0) - min((s.start for s in self.spans), default=0.0)

    @property
    def span(self) -> float:
        """The longest first-start-to-last-end of any one device's compute ("zero bubble" papers report this)."""
        rows = [row for row in map(self.compute, range(self.n_devices)) if row]
        return max((row[-1].end - row[0].start for row in rows), default=0.0)

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
