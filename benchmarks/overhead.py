"""What pipelining costs beyond the plain micro-batched loop, one thread each, in one run, beside torchgpipe 0.0.7.

    python benchmarks/overhead.py [--markdown benchmarks/results/overhead.md]

CPU time, the contenders taking turns. The speed of a machine drifts, so each turn is compared with the plain loop's in the
same round; the table has the median of these ratios, and their middle half. A cell is one (stage, micro-batch), forward and
backward. Under "always" the plain loop runs every forward twice as well, the first time without gradients.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from partition_models import UNet
from rich.console import Console
from rich.table import Table
from torch import nn

import pipecompile as pc

Step = Callable[[], object]

SCHEDULES = ("gpipe", "1f1b", "zb-h1")


def mlp() -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.ReLU())])


def plain(model: nn.Module, x: torch.Tensor, target: torch.Tensor, count: int, *, twice: bool = False) -> Step:
    """The loop that everybody writes: gradient accumulation over micro-batches. `twice` is what recomputing takes."""

    def step() -> None:
        for part, wanted in zip(torch.tensor_split(x, count), torch.tensor_split(target, count), strict=True):
            if twice:
                with torch.no_grad():
                    model(part)
            (F.cross_entropy(model(part), wanted) * (len(part) / len(x))).backward()

    return step


def bare(model: nn.Sequential, x: torch.Tensor, target: torch.Tensor, stages: int, count: int) -> Step:
    """The floor: detach, forward and autograd.backward per cell, and nothing else. For the Sequential only."""
    size = len(model) // stages
    parts = [model[i * size : (i + 1) * size] for i in range(stages)]

    def step() -> None:
        for part, wanted in zip(torch.tensor_split(x, count), torch.tensor_split(target, count), strict=True):
            value, cells = part, []
            for stage in parts:
                leaf = value.detach().requires_grad_()
                value = stage(leaf)
                cells.append((leaf, value))
            gradient = None
            value = F.cross_entropy(value, wanted) * (len(part) / len(x))
            cells[-1] = (cells[-1][0], value)
            for leaf, made in reversed(cells):
                torch.autograd.backward(made, gradient)
                gradient = leaf.grad

    return step


def ours(model: nn.Module, x: torch.Tensor, target: torch.Tensor, stages: int, count: int, **options: Any) -> Step:
    pipe = pc.compile(
        model,
        stages,
        example_args=(x,),
        n_microbatches=count,
        loss_fn=F.cross_entropy,
        cost="analytic",
        dispatch="inline",
        devices=["cpu"] * stages,
        batch_norm="each",
        **options,
    )
    return lambda: pipe.step(x, target=target)


def torchgpipe(
    model: nn.Sequential, x: torch.Tensor, target: torch.Tensor, stages: int, count: int, checkpoint: str = "never"
) -> Step:
    from torchgpipe import GPipe

    size, rest = divmod(len(model), stages)
    balance = [size + (i < rest) for i in range(stages)]
    pipe = GPipe(model, balance, devices=["cpu"] * stages, chunks=count, checkpoint=checkpoint)
    return lambda: F.cross_entropy(pipe(x), target).backward()


def as_sequential(model: nn.Module) -> nn.Sequential:
    """ResNet's children as torchgpipe wants them."""
    children = [child for part in model.children() for child in (part if isinstance(part, nn.Sequential) else [part])]
    return nn.Sequential(*children[:-1], nn.Flatten(), children[-1])


def measure(steps: dict[str, Step], repeats: int, inner: int) -> dict[str, list[float]]:
    """CPU seconds of one step in each round; who begins a round rotates."""
    for step in steps.values():
        step(), step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    gc.disable()
    for turn in range(repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            start = time.process_time()
            for _ in range(inner):
                steps[name]()
            times[name].append((time.process_time() - start) / inner)
    gc.enable()
    return times


def small(repeats: int, checkpoint: str) -> dict[str, list[float]]:
    """The MLP, whose cells compute next to nothing, with every schedule."""
    x, target = torch.randn(64, 64), torch.randint(0, 64, (64,))
    model, again = mlp(), checkpoint == "always"
    given = x, target, 4, 8
    steps = {"plain loop": plain(copy.deepcopy(model), x, target, 8, twice=again)}
    if not again:
        steps["bare cells"] = bare(copy.deepcopy(model), *given)
    for schedule in SCHEDULES:
        steps[schedule] = ours(copy.deepcopy(model), *given, schedule=schedule, checkpoint=checkpoint)
    steps["torchgpipe"] = torchgpipe(copy.deepcopy(model), *given, checkpoint)
    return measure(steps, repeats, inner=20)


def large(repeats: int, model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> dict[str, list[float]]:
    steps = {"plain loop": plain(copy.deepcopy(model), x, target, 4)}
    for schedule in SCHEDULES:
        steps[schedule] = ours(copy.deepcopy(model), x, target, 4, 4, schedule=schedule)
    if isinstance(model, torchvision.models.ResNet):
        steps["torchgpipe"] = torchgpipe(as_sequential(copy.deepcopy(model)), x, target, 4, 4)
    return measure(steps, repeats, inner=1)


def table(title: str, times: dict[str, list[float]], cells: int) -> Table:
    result = Table("", "ms a step", "x plain loop", "middle half", "us a cell beyond it", title=title)
    base = times["plain loop"]
    for name, taken in times.items():
        ratios = [mine / theirs for mine, theirs in zip(taken, base, strict=True)]
        low, ratio, high = statistics.quantiles(ratios, n=4)
        beyond = statistics.median(mine - theirs for mine, theirs in zip(taken, base, strict=True)) / cells * 1e6
        middle = f"{low:.3f} to {high:.3f}" if name != "plain loop" else ""
        result.add_row(name, f"{statistics.median(taken) * 1e3:.2f}", f"{ratio:.3f}", middle, f"{beyond:.1f}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, classes = torch.randn(16, 3, 64, 64), torch.randint(0, 1000, (16,))
    pictures, pixels = torch.randn(8, 3, 96, 96), torch.randint(0, 2, (8, 96, 96))
    deep, skipping = torchvision.models.resnet101(), UNet(width=16)
    chain = "8 x (Linear 64 + ReLU), batch 64, 4 stages x 8 micro-batches"
    tables = [
        table(f"(a) {chain}", small(options.repeats * 3, "never"), 32),
        table('(b) the same, checkpoint="always"', small(options.repeats * 3, "always"), 32),
        table(
            "(c) ResNet-101, batch 16, 64x64, 4 stages x 4 micro-batches",
            large(options.repeats, deep, images, classes),
            16,
        ),
        table(
            "(d) U-Net, depth 5, batch 8, 96x96, 4 stages x 4 micro-batches",
            large(options.repeats, skipping, pictures, pixels),
            16,
        ),
    ]
    console = Console(record=True, width=100)
    for one in tables:
        console.print(one)
    if options.markdown:
        text = console.export_text()
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        options.markdown.write_text(
            f"# Overhead\n\n`python benchmarks/overhead.py`, torch {torch.__version__}, one thread.\n\n```\n{text}```\n"
        )


if __name__ == "__main__":
    main()
