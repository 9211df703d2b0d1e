"""A step on ranks beside `torch.distributed.pipelining`: the same stages, order of actions, micro-batches and ranks, in one run.

    python benchmarks/distributed.py [--ranks 2 4] [--markdown benchmarks/results/distributed.md]

gloo on this machine, a thread per rank. The two take turns; each turn of ours is compared with theirs of the same round. A round
of a small model is many steps, since one step is a few milliseconds. "Beyond compute" is what a step takes beyond the makespan
of its schedule with cells as fast as one process runs them and messages that take no time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed import pipelining

import pipecompile as pc
from pipecompile.ir import Action

Step = Callable[[], object]
SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
}


def mlp() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(64, 64), torch.randint(0, 64, (64,))


def resnet() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    return torchvision.models.resnet50(), torch.randn(16, 3, 64, 64), torch.randint(0, 1000, (16,))


class Tower(nn.Module):
    """The encoder of a transformer and a head."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
        self.head = nn.Linear(256, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean(1))


def tower() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    return Tower(), torch.randn(16, 64, 256), torch.randint(0, 100, (16,))


MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, torch.Tensor, torch.Tensor]], str, int, float]] = {
    "mlp": (mlp, "8 x (Linear 64 + ReLU), batch 64", 8, 1.0),
    "resnet": (resnet, "ResNet-50, batch 16, 64x64", 8, 0.1),
    "tower": (tower, "8 transformer layers of 256, 64 tokens, batch 16", 8, 0.1),
}
"""How it is made, what it is, micro-batches, and rounds of it per round of the small one."""


def of_torch(pipe: Any, kind: str, x: torch.Tensor, target: torch.Tensor, count: int) -> Step:
    """Our stages under its schedule, which must order the actions as ours does."""
    stages, rank = pipe.torch_stages(), dist.get_rank()
    schedule = SCHEDULES[kind](stages if kind == "interleaved" else stages[0], count, loss_fn=F.cross_entropy)
    args = (x,) if rank == 0 else ()
    extra = {"target": target} if rank == dist.get_world_size() - 1 else {}
    return lambda: schedule.step(*args, **extra, losses=[], return_outputs=False)


def contenders(make: Callable[..., Any], kind: str, count: int) -> tuple[dict[str, Step], float, int]:
    """Both steps, the makespan with free messages, and the number of cells."""
    torch.manual_seed(0)
    model, x, target = make()
    n_stages = dist.get_world_size() * (2 if kind == "interleaved" else 1)
    pipe = pc.compile(
        model,
        n_stages,
        example_args=(x,),
        n_microbatches=count,
        loss_fn=F.cross_entropy,
        schedule=kind,
        cost="analytic",
    )
    steps: dict[str, Step] = {
        "ours": lambda: pipe.step(x, target=target),
        "torch": of_torch(pipe, kind, x, target, count),
    }
    found = []
    for step in steps.values():
        step()
        pipe.zero_grad()
        step()
        found.append([parameter.grad for parameter in pipe.parameters()])
        pipe.zero_grad()
    for ours, other in zip(*found, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-3, atol=1e-5)
    return steps, ideal(pipe, steps["ours"]), n_stages * count


def ideal(pipe: Any, step: Step) -> float:
    """The makespan of the schedule with the least time of every stage's cells, and free messages."""
    least: dict[tuple[str, int], float] = {}
    for _ in range(10):
        step()
        for span in pipe.measured.spans:
            action = Action.parse(span.name)
            key = action.kind.value, action.stage
            least[key] = min(least.get(key, span.end - span.start), span.end - span.start)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, least)
    known = {key: seconds for part in parts for key, seconds in part.items()}
    forward, backward = ([known[kind, stage] for stage in range(pipe.schedule.n_stages)] for kind in "FB")
    free = [0.0] * len(backward)
    return pc.simulate(pipe.schedule, forward=forward, input_grad=backward, weight_grad=free).makespan


def rounds(steps: dict[str, Step], repeats: int, inner: int) -> dict[str, list[float]]:
    """Seconds of one step in each round, all ranks beginning together; who begins a round rotates."""
    times: dict[str, list[float]] = defaultdict(list)
    names = list(steps)
    for turn in range(repeats):
        for name in names[turn % 2 :] + names[: turn % 2]:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(inner):
                steps[name]()
            dist.barrier()
            times[name].append((time.perf_counter() - start) / inner)
    return times


def measure(names: list[str], kinds: list[str], repeats: int, out: Path) -> None:
    """What each rank does; the first one writes the results down."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for name in names:
        make, _, count, share = MODELS[name]
        for kind in kinds:
            steps, floor, cells = contenders(make, kind, count)
            turns = max(5, int(repeats * share * 2))
            times = rounds(steps, turns, 20 if share == 1.0 else 1)
            if dist.get_rank() == 0:
                with out.open("a") as file:
                    file.write(
                        json.dumps({"model": name, "kind": kind, "floor": floor, "cells": cells, **times}) + "\n"
                    )
    dist.destroy_process_group()


def launch(options: argparse.Namespace, count: int, out: Path) -> list[dict[str, Any]]:
    """Start so many ranks and return what they found."""
    own = [f"--models={options.models}", f"--schedules={options.schedules}", f"--repeats={options.repeats}"]
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    subprocess.run([*ranks, __file__, *own, f"--out={out}"], env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    return [json.loads(line) for line in out.read_text().splitlines()]


def table(lines: Sequence[dict[str, Any]], title: str) -> Table:
    result = Table(
        "", "ms, ours", "ms, torch", "ours / torch", "middle half", "us a cell beyond compute", "torch", title=title
    )
    for line in lines:
        ratios = [mine / other for mine, other in zip(line["ours"], line["torch"], strict=True)]
        low, ratio, high = statistics.quantiles(ratios, n=4)
        taken = [statistics.median(line[name]) for name in ("ours", "torch")]
        beyond = [f"{(seconds - line['floor']) / line['cells'] * 1e6:.0f}" for seconds in taken]
        figures = [f"{seconds * 1e3:.2f}" for seconds in taken]
        result.add_row(line["kind"], *figures, f"{ratio:.3f}", f"{low:.3f} to {high:.3f}", *beyond)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--out", type=Path, help="for a rank: where results go")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    options = parser.parse_args()
    if options.out:
        measure(options.models.split(","), options.schedules.split(","), options.repeats, options.out)
        return
    console = Console(record=True, width=110)
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            lines = launch(options, ranks, Path(folder) / "results.jsonl")
        for name in options.models.split(","):
            _, what, count, _ = MODELS[name]
            title = f"{what}, {count} micro-batches, {ranks} ranks"
            console.print(table([line for line in lines if line["model"] == name], title))
    if options.markdown:
        ranks = " ".join(map(str, options.ranks))
        asked = f"--ranks {ranks} --models {options.models} --repeats {options.repeats}"
        command = f"`python benchmarks/distributed.py {asked}`, torch {torch.__version__}, {os.cpu_count()} cores"
        text = f"{command}, one thread a rank.\n\n```\n{console.export_text()}```\n"
        options.markdown.write_text(f"# Ranks\n\n{text}")


if __name__ == "__main__":
    main()
