"""A step as it is simulated from profiled costs against the step that runs: two stages on two CPU devices, in threads.

    python benchmarks/prediction.py [--only U-Net] [--markdown benchmarks/results/prediction.md]

One thread a device, four micro-batches. Each round compiles anew, and then runs the schedules in turns. Predicted: the makespan of
`pipe.simulate()`, from costs that were profiled before the first step. Calibrated: the same with the costs that `pc.calibrate` takes from
each step. Measured: the makespan of `pipe.measured`, warm. Medians over all rounds and steps, and the middle half of what was measured.
"Whole step" is the wall-clock time of `pipe.step`, which also looks for changes of the model and divides the batch.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table
from trained import SUBJECTS, Subject

import pipecompile as pc

MODELS = ("ResNet-18, 96 px", "ResNet-50, 64 px", "U-Net, depth 5", "ViT-small, 96 px", "GPT-2, 6 layers")

SCHEDULES = ("gpipe", "1f1b", "zb-h1")

WARM, STEPS = 2, 3
"""Steps of a turn: the first ones lower the schedule and start its threads, the others are timed."""


@dataclass
class Row:
    """Seconds of a step under one schedule."""

    predicted: list[float] = field(default_factory=list)
    calibrated: list[float] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)

    def run(self, subject: Subject, pipe: pc.Pipeline) -> None:
        """Take a step, and note it."""
        start = perf_counter()
        subject.step(pipe)
        self.whole.append(perf_counter() - start)
        self.measured.append(pipe.measured.makespan)
        self.calibrated.append(pc.simulate(pipe.program, **pc.calibrate(pipe.measured)).makespan)

    def cells(self) -> tuple[str, ...]:
        low, middle, high = quantiles(self.measured, n=4)
        said = median(self.predicted), median(self.calibrated)
        times = (f"{1e3 * seconds:.0f}" for seconds in (*said, middle, median(self.whole)))
        halves = (f"{low / seconds:.3f} to {high / seconds:.3f}" for seconds in said)
        ratios = (f"{middle / seconds:.3f}" for seconds in said)
        return *times, *(cell for pair in zip(ratios, halves, strict=True) for cell in pair)


def rows_of(subject: Subject, rounds: int) -> dict[str, Row]:
    """Return a row per schedule."""
    rows = {name: Row() for name in SCHEDULES}
    for _ in range(rounds):
        pipe = subject.compile(2, dispatch="threads")
        for name, row in rows.items():
            pipe.reschedule(name)
            row.predicted.append(pipe.simulate().makespan)
            for _ in range(WARM):
                subject.step(pipe)
            for _ in range(STEPS):
                row.run(subject, pipe)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the models' names")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    columns = (
        "predicted, ms",
        "calibrated, ms",
        "measured, ms",
        "whole step, ms",
        "measured / predicted",
        "middle half",
    )
    table = Table("", "schedule", *columns, "measured / calibrated", "middle half")
    for model in MODELS:
        if options.only in model:
            for name, row in rows_of(SUBJECTS[model](), options.rounds).items():
                table.add_row(model, name, *row.cells())
    console = Console(record=True, width=190)
    console.print(table)
    if options.markdown:
        head = f"# Predicted steps\n\n`python benchmarks/prediction.py`, torch {torch.__version__}, {os.cpu_count()} cores.\n"
        options.markdown.write_text(f"{head}\n```\n{console.export_text()}```\n")


if __name__ == "__main__":
    main()
