"""A step as it is simulated from profiled costs against the step that runs: two stages on two CPU devices, in threads.

    python benchmarks/prediction.py [--only U-Net] [--markdown benchmarks/results/prediction.md]

One thread a device, four micro-batches. Predicted: the makespan of `pipe.simulate()`. Measured: wall-clock time of
`pipe.step`, all of it, warm, the schedules taking turns; the median over all steps, and their middle half.
"""

from __future__ import annotations

import argparse
import os
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


def ratios(subject: Subject, rounds: int) -> dict[str, tuple[float, list[float]]]:
    """Per schedule the predicted seconds, and the measured ones of every round."""
    pipe = subject.compile(2, dispatch="threads")
    predicted, taken = dict[str, float](), {name: list[float]() for name in SCHEDULES}
    for turn in range(rounds):
        for name in SCHEDULES:
            pipe.reschedule(name)
            predicted[name] = pipe.simulate().makespan
            steps = [_seconds(subject, pipe) for _ in range(WARM + STEPS)]
            if turn:
                taken[name] += steps[WARM:]
    return {name: (predicted[name], taken[name]) for name in SCHEDULES}


def _seconds(subject: Subject, pipe: pc.Pipeline) -> float:
    start = perf_counter()
    subject.step(pipe)
    return perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the models' names")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    table = Table("", "schedule", "predicted, ms", "measured, ms", "measured / predicted", "middle half")
    for model in MODELS:
        if options.only in model:
            for name, (predicted, taken) in ratios(SUBJECTS[model](), options.rounds).items():
                low, _, high = (seconds / predicted for seconds in quantiles(taken, n=4))
                middle = median(taken)
                times = (f"{1e3 * predicted:.0f}", f"{1e3 * middle:.0f}", f"{middle / predicted:.2f}")
                table.add_row(model, name, *times, f"{low:.2f} to {high:.2f}")
    console = Console(record=True, width=110)
    console.print(table)
    if options.markdown:
        head = f"# Predicted steps\n\n`python benchmarks/prediction.py`, torch {torch.__version__}, {os.cpu_count()} cores.\n"
        options.markdown.write_text(f"{head}\n```\n{console.export_text()}```\n")


if __name__ == "__main__":
    main()
