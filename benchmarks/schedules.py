"""Our schedules beside those of other generators: makespan, span and peaks, at tF = tI = tW = 1.

    python benchmarks/schedules.py [--markdown benchmarks/results/schedules.md]

The reference has what the generators of torch, DeepSpeed, JaxPP and sail-sg give, one line each. "Theirs" is the best of
those for a schedule, P and M: the least makespan, and the least peak among those that reach it. All stages of a device
together take 1 for F, I and W each; a peak counts micro-batches, a stage of a device that has two as a half.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from pipecompile.ir import Kind
from pipecompile.ir.in_flight import in_flight
from pipecompile.schedules import build_schedule
from pipecompile.simulation.simulator import simulate

REFERENCE = Path(__file__).parent.parent / "tests" / "schedules" / "reference.csv"
NAMES = {
    "GPipe": ("gpipe", 1),
    "1F1B": ("1f1b", 1),
    "Interleaved1F1B(v=2)": ("interleaved", 2),
    "LoopedBFS(v=2)": ("looped-bfs", 2),
    "ZB-H1": ("zb-h1", 1),
    "ZB-H2": ("zb-h2", 1),
    "InterleavedZB(v=2)": ("interleaved-zb", 2),
    "ZBV": ("zbv", 2),
    "V-Half": ("v-half", 2),
    "V-Min": ("v-min", 2),
    "DualPipeV": ("dualpipev", 2),
}
"""Their name: ours, and the stages per device."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one schedule: the longest times and the largest peaks of any device."""

    makespan: float
    span: float
    until_w: float
    until_i: float

    def no_worse(self, other: Figures) -> bool:
        return all(getattr(self, name) <= getattr(other, name) for name in self.__slots__)


@dataclass(frozen=True, slots=True)
class Row:
    """A schedule for P devices and M micro-batches; `theirs` is None when no generator can."""

    name: str
    devices: int
    microbatches: int
    ours: Figures
    theirs: Figures | None
    who: str

    @property
    def bound(self) -> float:
        """No synchronous step is shorter: the last device waits for P - 1 forwards, and then has 3 M to do."""
        chunks = NAMES[self.name][1]
        return 3 * self.microbatches + (self.devices - 1) / chunks


def rows() -> Iterator[Row]:
    """One per schedule, P and M of the reference."""
    with REFERENCE.open() as file:
        lines = list(csv.DictReader(file))
    key = ("schedule", "P", "M")
    lines.sort(key=lambda line: (list(NAMES).index(line["schedule"]), int(line["P"]), int(line["M"])))
    for (name, p, m), group in groupby(lines, key=lambda line: tuple(line[k] for k in key)):
        known = [line for line in group if line["makespan"]]
        theirs = _best(known)
        who = (
            ", ".join(line["generator"] for line in known if float(line["makespan"]) == theirs.makespan)
            if theirs
            else ""
        )
        yield Row(name, int(p), int(m), figures(name, int(p), int(m)), theirs, who)


def figures(name: str, devices: int, microbatches: int) -> Figures:
    """What we build, simulated."""
    ours, chunks = NAMES[name]
    schedule = build_schedule(ours, chunks * devices, microbatches, n_devices=devices)
    share = 1 / chunks
    timeline = simulate(schedule, forward=share, input_grad=share, weight_grad=share)
    until_i = max(in_flight(schedule.rows, schedule.placement, until=Kind.INPUT_GRAD))
    return Figures(timeline.makespan, timeline.span, max(timeline.peak_in_flight), until_i)


def _best(lines: Sequence[dict[str, str]]) -> Figures | None:
    if not lines:
        return None
    makespan = min(float(line["makespan"]) for line in lines)
    fastest = [line for line in lines if float(line["makespan"]) == makespan]
    return Figures(
        makespan,
        min(float(line["span_max"]) for line in lines),
        min(float(line["peak_W_max"]) for line in lines),
        min(max(map(float, line["peak_I_per_rank"].split())) for line in fastest),
    )


def page(found: Sequence[Row]) -> str:
    """The table as markdown."""
    known = [row for row in found if row.theirs is not None]
    met = [row for row in known if row.theirs and row.ours.no_worse(row.theirs)]
    better = [row for row in known if row.theirs and row.ours != row.theirs and row.ours.no_worse(row.theirs)]
    alone = len(found) - len(known)
    head = [
        "schedule",
        "P",
        "M",
        "makespan",
        "theirs",
        "bound",
        "span",
        "theirs",
        "peak until W",
        "theirs",
        "until I",
        "theirs",
        "best of",
    ]
    lines = [
        "# Schedules beside those of other generators",
        "",
        "Written by `benchmarks/schedules.py`; at tF = tI = tW = 1, transfers free. Peaks are micro-batches in flight, counted",
        "until W, and until I. The bound is M T + (P - 1) tF / v.",
        "",
        f"{len(met)} of {len(known)} are no worse in any figure, {len(better)} of them better in some; "
        f"{alone} more no other generator can build.",
        "",
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
        *(_line(row) for row in found),
    ]
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    cells = [NAMES[row.name][0], str(row.devices), str(row.microbatches)]
    for name in Figures.__slots__:
        cells += [f"{getattr(row.ours, name):g}", f"{getattr(row.theirs, name):g}" if row.theirs else "none"]
        if name == "makespan":
            cells.append(f"{row.bound:g}")
    return f"| {' | '.join([*cells, row.who])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path, help="write the table here")
    arguments = parser.parse_args()
    text = page(list(rows()))
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text)


if __name__ == "__main__":
    main()
