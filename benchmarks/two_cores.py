"""ResNet-50 in two CPU stages under 1F1B on two cores, against the same micro-batched loop on one core, in one run.

    python benchmarks/two_cores.py [--markdown benchmarks/results/two_cores.md]

Wall-clock time, the contenders taking turns; every contender computes the same gradients.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import torchvision
from rich.console import Console
from rich.table import Table

import pipecompile as pc

Step = Callable[[], object]


def contenders(batch: int, size: int, count: int) -> dict[str, tuple[int, Step]]:
    """Name -> (intra-op threads, one step)."""
    x, target = torch.randn(batch, 3, size, size), torch.randint(0, 1000, (batch,))
    model = torchvision.models.resnet50()
    eager = copy.deepcopy(model)

    def loop() -> None:
        for part, wanted in zip(torch.tensor_split(x, count), torch.tensor_split(target, count), strict=True):
            (F.cross_entropy(eager(part), wanted) * (len(part) / batch)).backward()

    def pipe(dispatch: str) -> Step:
        compiled = pc.compile(
            copy.deepcopy(model), 2, example_args=(x,), n_microbatches=count, loss_fn=F.cross_entropy,
            devices=["cpu"] * 2, dispatch=dispatch, cost="profile",
        )  # fmt: skip
        print(compiled)
        return lambda: compiled.step(x, target=target)

    torch.set_num_threads(1)  # costs are measured as the stages will run
    return {
        "plain loop, one core": (1, loop),
        "plain loop, two intra-op threads": (2, loop),
        "pipecompile inline, one core": (1, pipe("inline")),
        "pipecompile threads, two stages": (1, pipe("threads")),
    }


def measure(steps: dict[str, tuple[int, Step]], repeats: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 1):
        for name, (threads, step) in steps.items():
            torch.set_num_threads(threads)
            start = time.perf_counter()
            step()
            if repeat:
                times[name].append(time.perf_counter() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int, default=112)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    times = measure(contenders(options.batch, options.size, options.microbatches), options.repeats)
    base = times["plain loop, one core"]
    title = f"ResNet-50, batch {options.batch} at {options.size}x{options.size}, {options.microbatches} micro-batches"
    table = Table("", "s a step", "x faster than one core", "range", title=title)
    for name, taken in times.items():
        ratios = sorted(a / b for a, b in zip(base, taken, strict=True))
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        table.add_row(name, f"{statistics.median(taken):.2f}", f"{statistics.median(ratios):.2f}", spread)
    console = Console(record=True, width=110)
    console.print(table)
    if options.markdown:
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        head = f"# Two cores\n\n`python benchmarks/two_cores.py`, torch {torch.__version__}, {os.cpu_count()} cores.\n"
        options.markdown.write_text(f"{head}\n```\n{console.export_text()}```\n")


if __name__ == "__main__":
    main()
