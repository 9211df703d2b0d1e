"""The tables that torchgpipe published, on the devices at hand: speed of ResNet-101, U-Net and AmoebaNet-D in stages.

    python benchmarks/published.py [--devices cuda] [--markdown benchmarks/results/published.md]

On GPUs the published sizes, on CPUs small ones, one core a device. A step is forward and backward of a mini-batch under 1F1B, with
checkpointing off; batch and micro-batches are the same in all rows of a table, which they are not in the published ones. torchgpipe
has one worker for all stages on a CPU, so there it overlaps nothing. The contenders take turns; what is faster is the median of the
ratios to the plain loop over micro-batches in the same round.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter

import torch
import torch.nn.functional as F
import torchvision
from overhead import as_sequential
from published_models import AmoebaNetD, UNet
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import pipecompile as pc

Step = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Case:
    """A published table: the model, a batch of so many images, and what was published for 1, 2, 4 and 8 GPUs, as
    factors of one without pipelining; of AmoebaNet-D there are none.
    """

    title: str
    model: Callable[[], nn.Module]
    images: tuple[int, ...]
    count: int
    published: dict[int, float]

    def batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        x = torch.randn(self.images, device=device)
        if self.title.startswith("U-Net"):
            return x, torch.rand(self.images[0], 1, *self.images[2:], device=device)
        return x, torch.randint(0, 1000, self.images[:1], device=device)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        pixels = self.title.startswith("U-Net")
        return F.binary_cross_entropy_with_logits(output, target) if pixels else F.cross_entropy(output, target)


RESNET, UNETS = {1: 0.853, 2: 1.414, 4: 2.774, 8: 4.294}, {1: 0.858, 2: 1.246, 4: 2.352, 8: 3.105}

LARGE = (
    Case("ResNet-101", torchvision.models.resnet101, (256, 3, 224, 224), 16, RESNET),
    Case("U-Net (5, 64)", lambda: UNet(5, 64), (64, 3, 192, 192), 16, UNETS),
    Case("AmoebaNet-D (18, 256)", lambda: AmoebaNetD(18, 256), (128, 3, 224, 224), 32, {}),
)
SMALL = (
    Case("ResNet-101", torchvision.models.resnet101, (16, 3, 96, 96), 8, RESNET),
    Case("U-Net (5, 8)", lambda: UNet(5, 8), (16, 3, 96, 96), 8, UNETS),
    Case("AmoebaNet-D (6, 64)", lambda: AmoebaNetD(6, 64), (16, 3, 96, 96), 8, {}),
)


def contenders(case: Case, devices: list[torch.device], counts: list[int]) -> dict[str, Step]:
    x, target = case.batch(devices[0])
    model = case.model().to(devices[0])
    steps = {"plain loop": _plain(case, copy.deepcopy(model), x, target)}
    for count in counts:
        steps[f"pipecompile, {count}"] = _ours(case, copy.deepcopy(model), x, target, devices[:count])
        if isinstance(model, torchvision.models.ResNet):
            steps[f"torchgpipe, {count}"] = _theirs(case, copy.deepcopy(model), x, target, devices[:count])
    return steps


def _plain(case: Case, model: nn.Module, x: Tensor, target: Tensor) -> Step:
    def step() -> None:
        for part, wanted in zip(x.chunk(case.count), target.chunk(case.count), strict=True):
            (case.loss(model(part), wanted) / case.count).backward()

    return step


def _ours(case: Case, model: nn.Module, x: Tensor, target: Tensor, devices: list[torch.device]) -> Step:
    pipe = pc.compile(
        model, len(devices), example_args=(x,), n_microbatches=case.count, loss_fn=case.loss, devices=devices,
        cost="profile", batch_norm="each", dispatch="threads" if devices[0].type == "cpu" else "auto",
    )  # fmt: skip
    return lambda: pipe.step(x, target=target)


def _theirs(case: Case, model: nn.Module, x: Tensor, target: Tensor, devices: list[torch.device]) -> Step:
    """Balanced by its own profiler, which cannot take layers that write into their input."""
    from torchgpipe import GPipe
    from torchgpipe.balance import balance_by_time

    chain = as_sequential(model)
    for layer in chain.modules():
        if isinstance(layer, nn.ReLU):
            layer.inplace = False
    balance = balance_by_time(len(devices), chain, x[: len(x) // case.count], device=devices[0])
    pipe = GPipe(chain, balance, devices=devices, chunks=case.count, checkpoint="never")
    return lambda: case.loss(pipe(x), target.to(pipe.devices[-1])).backward()


def measure(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            start = perf_counter()
            step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn:
                times[name].append(perf_counter() - start)
    return times


def table(case: Case, times: dict[str, list[float]]) -> Table:
    samples = case.images[0]
    title = f"{case.title}, batch {samples} at {case.images[-1]}x{case.images[-1]}, {case.count} micro-batches"
    result = Table("", "samples/s", "x plain loop", "middle half", "torchgpipe published", title=title)
    base = times["plain loop"]
    for name, taken in times.items():
        ratios = [theirs / mine for mine, theirs in zip(taken, base, strict=True)]
        low, ratio, high = quantiles(ratios, n=4)
        count = int(name.rpartition(" ")[2]) if name[-1].isdigit() else 0
        said = f"{case.published[count]:.3f}" if count in case.published else ""
        middle = f"{low:.2f} to {high:.2f}" if count else ""
        result.add_row(name, f"{samples / median(taken):.2f}", f"{ratio:.2f}", middle, said)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", default="", help="part of the models' names")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    here = torch.cuda.device_count() if options.devices == "cuda" else os.cpu_count() or 1
    counts = [count for count in (1, 2, 4, 8) if count <= here]
    devices = [torch.device("cuda", i) if options.devices == "cuda" else torch.device("cpu") for i in range(counts[-1])]
    console = Console(record=True, width=110)
    for case in LARGE if options.devices == "cuda" else SMALL:
        if options.only in case.title:
            console.print(table(case, measure(contenders(case, devices, counts), options.rounds)))
    if options.markdown:
        machine = torch.cuda.get_device_name() if options.devices == "cuda" else f"{here} cores, one thread a device"
        head = f"# The published tables\n\n`python benchmarks/published.py --devices {options.devices}`, torch {torch.__version__}, {machine}.\n"
        if options.devices == "cpu":
            head += "torchgpipe has one worker for all stages on a CPU, so here it overlaps nothing.\n"
        options.markdown.write_text(f"{head}\n```\n{console.export_text()}```\n")


if __name__ == "__main__":
    main()
