"""Towers into one head: what stages beside each other save, and how far the free cut is from towers pinned to devices of their own.

    python benchmarks/towers.py [--markdown benchmarks/results/towers.md]

n towers of equal layers, one per device, and a head on the last device; 4 micro-batches per device. "chain" is the order of 1F1B for
as many stages in a row, "depth" the order that warms up by the longest path after each stage, both simulated on the values that
really move. Held is what the first device keeps for its backward. The free cut has no pins: a ratio above 1 says how much longer its
step is than that of the pinned one. Analytic costs, nothing is measured.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import pipecompile as pc
from pipecompile.ir.training_routes import training_routes

HEADER = (
    "towers",
    "chain ms",
    "depth ms",
    "chain held KiB",
    "depth held KiB",
    "free ms",
    "free / pinned",
    "slowest free / pinned",
)


class Towers(nn.Module):
    """Towers side by side on one input, and a head on all their outputs."""

    def __init__(self, count: int, depth: int = 4, width: int = 256) -> None:
        super().__init__()
        self.towers = nn.ModuleList(self._layers(depth, width, width) for _ in range(count))
        self.head = self._layers(2, count * width, width)

    @staticmethod
    def _layers(depth: int, inputs: int, width: int) -> nn.Sequential:
        layers: list[nn.Module] = [nn.Linear(inputs, width), nn.ReLU()]
        for _ in range(depth - 1):
            layers += [nn.Linear(width, width), nn.ReLU()]
        return nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([tower(x) for tower in self.towers], dim=1))


def compiled(count: int, *, pinned: bool) -> pc.Pipeline:
    """Return the pipeline of so many towers, each pinned to a device of its own or free."""
    pins = {f"towers.{i}": i for i in range(count)} | {"cat": count, "head": count}
    return pc.compile(
        Towers(count), count + 1, example_args=(torch.randn(64 * (count + 1), 256),), n_microbatches=4 * (count + 1),
        loss_fn=torch.Tensor.mean, cost="analytic", devices=["cpu"] * (count + 1), pin=pins if pinned else None, bandwidth=50e9,
        time_limit=3.0, check=False,
    )  # fmt: skip


def row(count: int) -> tuple[str, ...]:
    pipe, free = (compiled(count, pinned=pinned) for pinned in (True, False))
    stages, m = pipe.plan.stages, 4 * (count + 1)
    routes = training_routes(pipe.plan.routes, count + 1, with_target=False)
    costs = {"forward": [s.forward for s in stages], "backward": [s.backward for s in stages],
             "saved_bytes": [s.held_bytes for s in stages], "bandwidth": 50e9}  # fmt: skip
    orders = [pc.build_schedule("1f1b", count + 1, m, routes=given) for given in (None, routes)]
    chain, depth = (pc.simulate(order, routes=routes, **costs) for order in orders)
    held = [timeline.peak_in_flight[0] * stages[0].held_bytes / 1024 for timeline in (chain, depth)]
    step, pinned = free.simulate().makespan, pipe.simulate().makespan
    ratio = free.plan.bottleneck / pipe.plan.bottleneck
    return (str(count), f"{1e3 * chain.makespan:.3f}", f"{1e3 * depth.makespan:.3f}", *(f"{size:.0f}" for size in held),
            f"{1e3 * step:.3f}", f"{step / pinned:.3f}", f"{ratio:.3f}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--markdown", type=Path, help="also write the table here")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = [row(count) for count in range(2, 9)]
    table = Table(*HEADER)
    for cells in rows:
        table.add_row(*cells)
    Console(width=160).print(table)
    if arguments.markdown:
        lines = ["| " + " | ".join(cells) + " |" for cells in (HEADER, *rows)]
        lines.insert(1, "|" + "---|" * len(HEADER))
        title = "# Towers into one head"
        text = "Analytic costs, simulated, written by `python benchmarks/towers.py --markdown benchmarks/results/towers.md`."
        arguments.markdown.write_text("\n".join([title, "", text, "", *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
