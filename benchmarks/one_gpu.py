"""Four stages on one GPU against the plain loop over micro-batches there: where nothing can overlap, what does a pipeline cost?

    python benchmarks/one_gpu.py [--markdown benchmarks/results/one_gpu.md]

Where kernels are long, the host must keep up with them; where they are short, CUDA graphs must launch faster than eager does.
The contenders take turns, and each is compared with the plain loop in the same round. Memory is the most that the allocator had
in use during a step beyond what was there before, beside what the simulator says for the four stages together.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter

import torch
import torch.nn.functional as F
import torchvision
from overhead import mlp, plain
from rich.console import Console
from rich.table import Table
from torch import nn

import pipecompile as pc

Step = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Case:
    title: str
    model: Callable[[], nn.Module]
    images: tuple[int, ...]
    count: int


CASES = (
    Case("compute-bound: ResNet-50", torchvision.models.resnet50, (256, 3, 224, 224), 8),
    Case("launch-bound: 8 x (Linear 64 + ReLU)", mlp, (64, 64), 8),
)


def contenders(case: Case, device: torch.device) -> tuple[dict[str, Step], dict[str, float]]:
    """The steps, and bytes that the simulator says."""
    x, target = torch.randn(case.images, device=device), torch.randint(0, 10, case.images[:1], device=device)
    model, said = case.model().to(device), {}
    steps: dict[str, Step] = {"plain loop": plain(copy.deepcopy(model), x, target, case.count)}
    for name, graphs in (("pipecompile", False), ("pipecompile, CUDA graphs", True)):
        pipe = pc.compile(
            copy.deepcopy(model), 4, example_args=(x,), n_microbatches=case.count, loss_fn=F.cross_entropy,
            devices=[device] * 4, cost="profile", batch_norm="each", cuda_graphs=graphs,
        )  # fmt: skip
        steps[name] = lambda pipe=pipe: pipe.step(x, target=target)  # type: ignore[misc]
        steps[name]()
        said[name] = sum(pipe.simulate().peak_memory)
    return steps, said


def timed(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 3):
        for name, step in steps.items():
            torch.cuda.synchronize()
            start = perf_counter()
            step()
            torch.cuda.synchronize()
            if turn >= 3:
                times[name].append(perf_counter() - start)
    return times


def held(step: Step) -> float:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before)


def table(case: Case, device: torch.device, rounds: int) -> Table:
    steps, said = contenders(case, device)
    times = timed(steps, rounds)
    result = Table("", "ms a step", "/ plain loop", "middle half", "MiB held", "MiB simulated", title=case.title)
    for name, taken in times.items():
        low, ratio, high = quantiles([mine / base for mine, base in zip(taken, times["plain loop"], strict=True)], n=4)
        simulated = f"{said[name] / 2**20:.0f}" if name in said else ""
        row = f"{1e3 * median(taken):.3f}", f"{ratio:.3f}", f"{low:.3f} to {high:.3f}"
        result.add_row(name, *row, f"{held(steps[name]) / 2**20:.0f}", simulated)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    torch.manual_seed(0)
    console = Console(record=True, width=110)
    for case in CASES:
        console.print(table(case, torch.device("cuda", 0), options.rounds))
    if options.markdown:
        machine = f"torch {torch.__version__}, {torch.cuda.get_device_name()}"
        head = f"# Four stages on one GPU\n\n`python benchmarks/one_gpu.py`, {machine}.\n"
        options.markdown.write_text(f"{head}\n```\n{console.export_text()}```\n")


if __name__ == "__main__":
    main()
