"""A timeline: spans per device, either predicted by the simulator or measured by the interpreter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pipecompile.errors import InputError, ScheduleError
from pipecompile.ir.action import Action
from pipecompile.ir.certificate import relative_gap
from pipecompile.ir.program import Program
from pipecompile.ir.views import html_of, writer_of
from pipecompile.text.input_checks import file_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Span", "Timeline"]

COMPUTE = "compute"


def _track(action: str) -> str:
    """Return the track of a measured instruction."""
    return "to host" if "OFFLOAD" in action else "from host" if "RELOAD" in action else COMPUTE


class Span(NamedTuple):
    """One bar of the chart. `name` is an action (2F0) on track "compute", or a value on the track of a copy ("to 2").

    `start` and `end` are seconds, or units of the costs.
    """

    device: int
    track: str
    name: str
    start: float
    end: float

    @property
    def action(self) -> Action | None:
        """The action of a bar on track "compute"; None for a copy."""
        try:
            return Action.parse(self.name)
        except ScheduleError:
            return None


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans in seconds (or in the unit of the costs), and per device a memory curve of (time, bytes) steps.

    `peak_in_flight[d]` is the largest number of micro-batches, or of slices, whose forward has run on device d and whose backward has
    not; a stage counts 1/(number of stages on d). `critical_path` is a chain of spans, each waiting for the one before,
    as long as the makespan. It is empty for a measured timeline. `bound` is a lower bound in seconds on the step of
    every schedule of the same problem, which the search of `auto_schedule` proved; None for other schedules.
    """

    n_devices: int
    spans: tuple[Span, ...]
    memory: tuple[tuple[tuple[float, float], ...], ...] = ()
    peak_in_flight: tuple[float, ...] = ()
    critical_path: tuple[Span, ...] = ()
    bound: float | None = None

    @classmethod
    def measured(cls, spans: Sequence[tuple[int, str, float, float]], n_devices: int) -> Timeline:
        """Return the timeline of measured compute instructions: (device, action, start, end), in seconds of any clock.

        OFFLOAD and RELOAD are copies, on the tracks "to host" and "from host". Times count from the first start. `n_devices` also
        counts devices without instructions.
        """
        origin = min((start for _, _, start, _ in spans), default=0.0)
        bars = tuple(
            Span(device, _track(name), name, start - origin, end - origin) for device, name, start, end in spans
        )
        return cls(n_devices, bars)

    def __repr__(self) -> str:
        figures = f"makespan={self.makespan:.6g}, bubble={self.bubble:.1%}"
        figures += "" if self.gap is None else f", bound={self.bound:.6g}, gap={self.gap:.1%}"
        return f"Timeline(n_devices={self.n_devices}, n_spans={len(self.spans)}, {figures})"

    def compute(self, device: int) -> list[Span]:
        """Return the compute spans of a device, by start."""
        return sorted((s for s in self.spans if s.device == device and s.track == COMPUTE), key=lambda s: s.start)

    @property
    def makespan(self) -> float:
        """Return the time from the first start to the last end over all devices and tracks."""
        return max((s.end for s in self.spans), default=0.0) - min((s.start for s in self.spans), default=0.0)

    @property
    def gap(self) -> float | None:
        """Return the share of the makespan that a better schedule could save at most; None without a bound."""
        return None if self.bound is None else relative_gap(self.makespan, self.bound)

    @property
    def spans_of_devices(self) -> tuple[float, ...]:
        """Return, per device, the time from the start of its first compute span to the end of its last; 0 without
        compute.
        """
        first, last = [math.inf] * self.n_devices, [-math.inf] * self.n_devices
        for span in self.spans:
            if span.track == COMPUTE:
                first[span.device] = min(first[span.device], span.start)
                last[span.device] = max(last[span.device], span.end)
        return tuple(max(0.0, b - a) for a, b in zip(first, last, strict=True))

    @property
    def span(self) -> float:
        """Return the largest of `spans_of_devices`, the figure that the "zero bubble" papers report."""
        return max(self.spans_of_devices, default=0.0)

    @property
    def busy(self) -> float:
        """Return the compute time summed over devices."""
        return sum(s.end - s.start for s in self.spans if s.track == COMPUTE)

    @property
    def bubble(self) -> float:
        """Return 1 - busy / (devices x makespan)."""
        total = self.n_devices * self.makespan
        return 1.0 - self.busy / total if total else 0.0

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """Return the highest point of each device's memory curve, in bytes."""
        return tuple(max((size for _, size in curve), default=0.0) for curve in self.memory)

    def save(self, path: str | Path, program: Program | None = None) -> None:
        """Write the Chrome trace, for https://ui.perfetto.dev; with the program of the timeline its transfers have arrows.

        Raise InputError for a path that does not end in .json, or that cannot be written.
        """
        file = file_path("path", path)
        if file.suffix != ".json":
            raise InputError(f"path={str(path)!r}: a timeline is saved as a Chrome trace",
                             hint=f"{file.with_suffix('.json')}; plot().savefig({str(path)!r}) draws it")  # fmt: skip
        writer_of("file")(file, writer_of("trace")(self, program=program))

    def plot(self, *, seconds: bool = True) -> Figure:
        """Return the Gantt chart as a figure of matplotlib; `seconds` False: times are in the unit of the costs.

        Raise ImportError without matplotlib.
        """
        figure: Figure = writer_of("figure")(self, seconds=seconds)
        return figure

    def _repr_html_(self) -> str | None:
        return html_of(self)
