"""Seconds to build, verify, simulate, lower, print and save schedules of many devices and micro-batches in periodic form.

    python benchmarks/periodic.py [--cases 64x1024,64x4096,128x4096,256x4096,512x4096] [--markdown benchmarks/results/periodic.md]

The schedule is 1f1b, with transfers of a tenth of a forward. Lowering includes the verification of the program with any number of
repetitions. "In full" is `lower` with its verifier for all micro-batches, where they have at most 140,000 actions. Seconds are those of
the processor, on one core.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from pathlib import Path
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
    schedule, build = timed(lambda: pc.build_periodic(name, devices, microbatches))
    _, check = timed(lambda: verify(schedule))
    steady, simulation = timed(lambda: pc.simulate_periodic(schedule, transfer=0.1, saved_bytes=1.0))
    _, csv = timed(lambda: (folder / "schedule.csv").write_text(schedule.to_csv()))
    _, text = timed(lambda: (folder / "schedule.json").write_text(schedule.to_json()))
    program, lowered = timed(lambda: pc.lower_periodic(schedule))
    _, save = timed(lambda: program.save(folder / "program.txt"))
    size = (folder / "program.txt").stat().st_size / 2**20
    actions = 2 * devices * microbatches
    full = f"{timed(lambda: lower(schedule.unrolled()))[1]:.1f}" if actions <= MOST else ""
    cells = [f"{devices} x {microbatches:,}", f"{actions:,}", f"{build:.1f}", f"{check:.1f}", f"{simulation:.1f}",
             f"{steady.simulated:,}", f"{csv:.2f}", f"{text:.2f}", f"{lowered:.1f}", f"{save:.1f}", f"{size:.0f}", full]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="64x1024,64x4096,128x4096,256x4096,512x4096")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    arguments = parser.parse_args()
    head = ["devices x micro-batches", "actions", "build s", "verify s", "simulate s", "repetitions simulated", "CSV s",
            "JSON s", "lower and verify s", "save the program s", "MiB", "in full s"]  # fmt: skip
    lines = [
        f"# Periodic schedules: {arguments.schedule}",
        "",
        *(line for line in (__doc__ or "").split("\n\n")[2].strip().split("\n")),
        "",
        f"Written by `benchmarks/periodic.py --cases {arguments.cases}`.",
        "",
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
    ]
    with TemporaryDirectory() as folder:
        for case in arguments.cases.split(","):
            lines.append(row(arguments.schedule, *map(int, case.split("x")), Path(folder)))
            print(lines[-1], flush=True)
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
