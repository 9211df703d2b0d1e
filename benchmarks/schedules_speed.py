"""How long schedules for a large cluster take: to build, verify, simulate, and, lowered, to verify and simulate again.

    python benchmarks/schedules_speed.py [--devices 64] [--microbatches 1024] [--markdown benchmarks/results/schedules_speed.md]

Every time is given in seconds and over that of a plain loop that makes one `Action` per action of the schedule.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from pipecompile.ir import Action, Program, Schedule, chain
from pipecompile.ir.gc_pause import without_collection
from pipecompile.passes.buffer_slots import assign_slots
from pipecompile.passes.communication_order import order_meetings
from pipecompile.passes.liveness import insert_frees
from pipecompile.passes.lower_actions import lower_actions
from pipecompile.passes.transfers import insert_transfers
from pipecompile.schedules import auto_schedule, build_schedule
from pipecompile.simulation.advice import advise
from pipecompile.simulation.simulator import simulate
from pipecompile.verifiers import verify

SUBJECTS = (("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zbv", 2))


@dataclass(frozen=True, slots=True)
class Line:
    """What was done with which schedule of how many actions or instructions."""

    name: str
    what: str
    size: int
    seconds: float
    ratio: float


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    start = perf_counter()
    result = function()
    return result, perf_counter() - start


def lines(name: str, chunks: int, devices: int, microbatches: int) -> list[Line]:
    schedule, building = timed(lambda: build_schedule(name, devices * chunks, microbatches, n_devices=devices))
    size = sum(map(len, schedule.rows))
    _, loop = timed(lambda: [Action(a.stage, a.kind, a.microbatch) for row in schedule.rows for a in row])
    found = [Line(name, "build", size, building, building / loop)]

    def add(what: str, subject: Schedule | Program, function: Callable[[], Any]) -> Any:
        result, seconds = timed(function)
        found.append(Line(name, what, sum(map(len, subject.rows)), seconds, seconds / loop))
        return result

    add("verify", schedule, lambda: verify(schedule))
    add("simulate", schedule, lambda: simulate(schedule, transfer=0.1, saved_bytes=1.0))
    add("advise", schedule, lambda: advise(schedule, transfer=0.1, most=1))
    program = add("lower, not verified between passes", schedule, lambda: lowered(schedule))
    add("verify the program, three models", program, lambda: verify(program))
    add("simulate the program", program, lambda: simulate(program, transfer=0.1, saved_bytes=1.0))
    return found


@without_collection
def lowered(schedule: Schedule) -> Program:
    ways = chain(schedule.n_stages)
    return assign_slots(insert_frees(order_meetings(insert_transfers(lower_actions(schedule, ways)))))


def search(devices: int, microbatches: int, chunks: int, **options: Any) -> Line:
    """`auto_schedule` on stages of several lengths."""
    stages = devices * chunks
    forward = [1 + 0.3 * (s * 7 % 5) for s in range(stages)]

    def found() -> Schedule:
        return auto_schedule(
            stages, microbatches, n_devices=devices, forward=forward, saved_bytes=1 / chunks, transfer=0.1, **options
        )

    schedule, seconds = timed(found)
    size = sum(map(len, schedule.rows))
    _, loop = timed(lambda: [Action(a.stage, a.kind, a.microbatch) for row in schedule.rows for a in row])
    limit = "" if not options else f", room for {options['memory_limit']:g}"
    return Line(f"auto, {stages} stages on {devices}, {microbatches}{limit}", "search", size, seconds, seconds / loop)


def page(found: list[Line], devices: int, microbatches: int) -> str:
    """The table as markdown."""
    head = ["schedule", "what", "actions or instructions", "seconds", "over a loop"]
    rows = [f"| {x.name} | {x.what} | {x.size:,} | {x.seconds:.2f} | {x.ratio:.0f} |" for x in found]
    return "\n".join(
        [
            f"# Schedules for {devices} devices and {microbatches:,} micro-batches",
            "",
            f"Python {platform.python_version()}, {platform.machine()}, written by `benchmarks/schedules_speed.py`. The last column is",
            "the time over that of a plain loop that makes one `Action` per action of the schedule.",
            "",
            f"| {' | '.join(head)} |",
            "|" + "---|" * len(head),
            *rows,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=1024)
    parser.add_argument("--markdown", type=Path, help="write the table here")
    arguments = parser.parse_args()
    found = [
        line for name, chunks in SUBJECTS for line in lines(name, chunks, arguments.devices, arguments.microbatches)
    ]
    found += [search(16, 64, 1), search(16, 64, 1, memory_limit=8.0), search(16, 64, 2)]
    text = page(found, arguments.devices, arguments.microbatches)
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text)


if __name__ == "__main__":
    main()
