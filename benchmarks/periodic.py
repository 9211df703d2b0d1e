"""Seconds to build, verify, simulate, lower, print and save schedules of many devices and micro-batches in periodic form.

    python benchmarks/periodic.py [--cases 1f1b:64x4096,1f1b:512x4096] [--markdown benchmarks/results/periodic.md]

Transfers take a tenth of a forward. Devices have one stage in 1f1b, and two in the other schedules. Lowering includes the verification
of the schedule and of the program with any number of repetitions. "Read back" parses the text of the program. "In full" is `lower` with
its verifier for all micro-batches, where they have at most 140,000 actions. Seconds are those of the processor, on one core; the memory is
the peak of the process in GiB.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

import pipecompile as pc
from pipecompile.passes import lower
from pipecompile.verifiers import verify

MOST = 140_000
"""Actions up to which all micro-batches are lowered as well."""


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """The result, and the processor seconds."""
    gc.collect()
    start = process_time()
    result = run()
    return result, process_time() - start


def row(name: str, devices: int, microbatches: int, folder: Path) -> str:
    """A line of the table."""
    stages = devices * (1 if name == "1f1b" else 2)
    schedule, build = timed(lambda: pc.build_periodic(name, stages, microbatches, n_devices=devices))
    _, check = timed(lambda: verify(schedule))
    _, simulation = timed(lambda: pc.simulate_periodic(schedule, transfer=0.1, saved_bytes=1.0))
    _, csv = timed(lambda: pc.PeriodicSchedule.from_csv(schedule.to_csv()))
    _, json = timed(lambda: pc.PeriodicSchedule.from_json(schedule.to_json()))
    program, lowered = timed(lambda: pc.lower_periodic(schedule))
    _, check_program = timed(lambda: verify(program))
    _, save = timed(lambda: program.save(folder / "program.txt"))
    text = (folder / "program.txt").read_text()
    _, parse = timed(lambda: pc.PeriodicProgram.from_text(text))
    gib = getrusage(RUSAGE_SELF).ru_maxrss / 2**20
    actions = sum(len(row) for row in schedule.period) * schedule.repetitions
    actions += sum(len(row) for part in (schedule.prologue, schedule.epilogue) for row in part)
    full = f"{timed(lambda: lower(schedule.unrolled()))[1]:.1f}" if actions <= MOST else ""
    seconds = (build, check, simulation, csv, json, lowered, check_program, save, parse)
    cells = [name, f"{devices} x {microbatches:,}", f"{actions:,}", *(f"{each:.1f}" for each in seconds),
             f"{len(text) / 2**20:.1f}", f"{gib:.1f}", full]  # fmt: skip
    return f"| {' | '.join(cells)} |"


CASES = (
    "1f1b:64x1024,1f1b:64x4096,1f1b:128x4096,1f1b:256x4096,1f1b:512x4096,zbv:64x4096,zbv:128x4096,zbv:256x4096,interleaved:64x4096,"
    "interleaved:128x4096,po-full:64x4096"
)


def in_process(case: str) -> str:
    """The line of a case, in a process of its own."""
    name, _, counts = case.partition(":")
    with TemporaryDirectory() as folder:
        return row(name, *map(int, counts.split("x")), Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--markdown", type=Path, help="write the table here")
    arguments = parser.parse_args()
    head = ["schedule", "devices x micro-batches", "actions", "build s", "verify s", "simulate s", "CSV and back s", "JSON and back s",
            "lower s", "verify the program s", "save it s", "read it back s", "text MiB", "peak GiB", "in full s"]  # fmt: skip
    lines = [
        "# Periodic schedules",
        "",
        *(line for line in (__doc__ or "").split("\n\n")[2].strip().split("\n")),
        "",
        f"Written by `benchmarks/periodic.py --cases {arguments.cases}`.",
        "",
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
    ]
    for case in arguments.cases.split(","):
        with get_context("spawn").Pool(1) as pool:
            lines.append(pool.apply(in_process, (case,)))
        print(lines[-1], flush=True)
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
