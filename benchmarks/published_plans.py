"""The published tables on paper: what the data sheet of their GPU and our simulator say of their hand balances, and of our cuts.

    python benchmarks/published_plans.py [--markdown benchmarks/results/published_plans.md]

torchgpipe's ResNet-101, U-Net and AmoebaNet-D at the published sizes, without memory: costs are computed for a Tesla P40 with links
of PCIe 3, under GPipe with all but the last micro-batch recomputed. The batch is the same in all rows of a table, which it is not
in the published ones. Their balances count the children of a Sequential; a stage here begins at the layer that theirs begins at, or
at the next one with weights. Memory is that of all devices together, parameters with gradients and optimizer state, and the rest,
of cuts that keep to the 24 GiB of the card.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torchvision
from published_models import AmoebaNetD, UNet
from rich.console import Console
from rich.table import Table
from torch import nn

import pipecompile as pc
from pipecompile.costs import DEVICES, analytic_costs
from pipecompile.parameters.placement import Homes

P40 = DEVICES["p40"]
GIB = 2**30


def resnet_child(place: int) -> str:
    """Of their 370: four, 33 blocks of eleven, three."""
    names = ["conv1", "bn1", "layer1.0.conv1", "layer1.0.conv1"]
    blocks = [f"layer{i + 1}.{j}" for i, count in enumerate((3, 4, 23, 3)) for j in range(count)]
    for block, following in zip(blocks, [*blocks[1:], ""], strict=True):
        inner = ["conv1", "conv1", "bn1", "conv2", "conv2", "bn2", "conv3", "conv3", "bn3"]
        names += [f"{block}.{name}" for name in inner] + [f"{following}.conv1" if following else "fc"] * 2
    return [*names, "fc", "fc", "fc"][place]


def unet_child(blocks: int, place: int) -> str:
    """Of their 241, for five blocks: levels of layers, a skip and a pool; the middle; levels of a resize, a skip and layers; one."""
    layers, names = 4 * blocks, list[str]()
    for level in range(5):
        names += [f"down.{level}.{i}" for i in range(layers)]
        names += [f"down.{level + 1}.0" if level < 4 else "middle.0"] * 2
    names += [f"middle.{i}" for i in range(layers)]
    for level in range(5):
        names += [f"up.{level}.0"] * 2 + [f"up.{level}.{i}" for i in range(layers)]
    return [*names, "last"][place]


def amoeba_child(place: int) -> str:
    return "stem" if place == 0 else "head" if place == 23 else f"cells.{place - 1}"


@dataclass(frozen=True, slots=True)
class Speed:
    """A published speed table: of (devices, micro-batches) the factor, and of devices the balance. Factors are of `base` devices
    with one micro-batch.
    """

    title: str
    model: Callable[[], nn.Module]
    images: tuple[int, ...]
    child: Callable[[int], str]
    published: dict[tuple[int, int], float]
    balances: dict[int, Sequence[int]]
    base: int = 1


SPEEDS = (
    Speed(
        "ResNet-101, batch 256", torchvision.models.resnet101, (256, 3, 224, 224), resnet_child,
        {(2, 16): 1.414, (4, 16): 2.774, (8, 16): 4.294},
        {2: (135, 235), 4: (44, 92, 124, 110), 8: (26, 22, 33, 44, 44, 66, 66, 69)},
    ),
    Speed(
        "U-Net (5, 64), batch 64", partial(UNet, 5, 64), (64, 3, 192, 192), partial(unet_child, 5),
        {(2, 16): 1.246, (4, 16): 2.352, (8, 16): 3.105},
        {2: (104, 137), 4: (30, 66, 84, 61), 8: (16, 27, 31, 44, 22, 57, 27, 17)},
    ),
    Speed(
        "AmoebaNet-D (18, 256), batch 128", partial(AmoebaNetD, 18, 256), (128, 3, 224, 224), amoeba_child,
        {(2, 4): 1.539, (2, 32): 1.773, (4, 4): 1.666, (4, 32): 2.709, (8, 4): 2.621, (8, 32): 4.953},
        {2: (9, 15), 4: (3, 6, 7, 8), 8: (2, 2, 2, 3, 3, 4, 4, 4)}, 2,
    ),
)  # fmt: skip

MEMORY = (
    *[("U-Net", UNet, *row) for row in ((6, 72, 1, "20.3"), (11, 128, 1, "20.5"), (24, 128, 2, "43.4"), (24, 160, 4, "79.1"), (48, 160, 8, "154.1"))],
    *[("AmoebaNet-D", AmoebaNetD, *row) for row in ((18, 416, 1, "3.57 + 0.91"), (18, 544, 2, "6.07 + 3.39"), (36, 544, 4, "11.80 + 6.91"), (72, 512, 8, "20.62 + 10.83"))],
)  # fmt: skip
"""Model, blocks, width, devices, and the GiB that were published. The first U-Net is the base, without recomputation."""


def compiled(model: nn.Module, images: tuple[int, ...], n_devices: int, count: int, **options: Any) -> pc.Pipeline:
    """A pipeline that is only planned: its parameters stay without memory."""
    how = {"schedule": "gpipe", "checkpoint": "except_last", "batch_norm": "each"} | options
    with patch.object(Homes, "move", lambda *_, **__: None):
        return pc.compile(
            model, n_devices, example_args=(torch.empty(images, device="meta"),), n_microbatches=count,
            loss_fn=torch.Tensor.mean, devices=["cpu"] * n_devices, bandwidth=P40.link_bandwidth,
            costs=lambda graph, inputs: analytic_costs(graph, inputs, device=P40), **how,
        )  # fmt: skip


def speeds(case: Speed) -> Table:
    """Against one device without recomputation; AmoebaNet-D, as published, against two with a single micro-batch."""
    with torch.device("meta"):
        model = case.model()
    base = compiled(model, case.images, case.base, 1)
    one = base.simulate().makespan
    table = Table(
        "devices",
        "micro-batches",
        "x published",
        "x simulated, their balance",
        "x simulated, our cut",
        "gap",
        title=case.title,
    )
    for (n_devices, count), published in case.published.items():
        starts = [*accumulate(case.balances[n_devices])][:-1]
        theirs = compiled(model, case.images, n_devices, count, split_before=[*map(case.child, starts)])
        ours = compiled(model, case.images, n_devices, count)
        found = [f"{one / pipe.simulate().makespan:.3f}" for pipe in (theirs, ours)]
        table.add_row(str(n_devices), str(count), f"{published:.3f}", *found, f"{ours.plan.gap:.2%}")
    return table


def memory() -> Table:
    table = Table(
        "",
        "devices",
        "parameters",
        "GiB published",
        "GiB of state",
        "GiB of the rest",
        "most on a device",
        title="Memory",
    )
    for title, build, blocks, width, n_devices, published in MEMORY:
        with torch.device("meta"):
            model = build(blocks, width)
        is_unet = build is UNet
        images, count = ((32, 3, 192, 192), 32) if is_unet else ((128, 3, 224, 224), 128)
        is_base = (blocks, width) == (6, 72)
        pipe = compiled(
            model, images, n_devices, 1 if is_base else count, checkpoint="never" if is_base else "except_last",
            optimizer=torch.optim.SGD if is_unet else torch.optim.RMSprop, memory_limit=P40.memory,
        )  # fmt: skip
        state, rest = [stage.state_bytes for stage in pipe.plan.stages], pipe.simulate().peak_memory
        most = max(map(sum, zip(state, rest, strict=True)))
        count = sum(p.numel() for p in model.parameters())
        row = (
            f"{count / 1e6:.1f} M",
            published,
            f"{sum(state) / GIB:.2f}",
            f"{sum(rest) / GIB:.2f}",
            f"{most / GIB:.2f}",
        )
        table.add_row(f"{title} ({blocks}, {width})", str(n_devices), *row)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    console = Console(record=True, width=120)
    for case in SPEEDS:
        console.print(speeds(case))
    console.print(memory())
    if options.markdown:
        head = (
            f"# The published tables on paper\n\n`python benchmarks/published_plans.py`, torch {torch.__version__}.\n"
        )
        options.markdown.write_text(f"{head}\n```\n{console.export_text()}```\n")


if __name__ == "__main__":
    main()
