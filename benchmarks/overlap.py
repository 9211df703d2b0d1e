"""Two copies of a pipeline: gradients reduced stage by stage, beside the last backwards, or all of them when the row is over.

    python benchmarks/overlap.py [--repeats 25] [--markdown benchmarks/results/overlap.md]

gloo on this machine, a thread per rank. The two take turns in one run. "Waiting" is for gradients, after the row: all that is
left of the messages. With two ranks each copy has its four stages on one rank.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import pipecompile as pc
from pipecompile.distributed import rank_executable as runner
from pipecompile.distributed.data_parallel.replicas import GradientReduction

CASES = [(2, "gpipe", 512, 32), (2, "gpipe", 2048, 64), (4, "interleaved", 1024, 256), (4, "interleaved", 2048, 64)]
"""Ranks, schedule, width of the layers, and samples of each copy."""

WAYS = ("beside", "at the end")


def pipelines(kind: str, width: int, x: torch.Tensor, target: torch.Tensor) -> dict[str, Callable[[], object]]:
    """A step with gradients of its own, either way."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(width, width), nn.ReLU())])
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()).view(2, -1), mesh_dim_names=("dp", "pp"))
    options: dict[str, Any] = {"schedule": kind, "n_microbatches": 4, "cost": "analytic", "loss_fn": F.cross_entropy}
    found = [pc.compile(copy.deepcopy(model), 4, mesh=mesh, example_args=(x,), **options) for _ in WAYS]
    found[0].step(x, target=target)
    with patch.object(runner, "completed", lambda *_: {}):  # nothing is complete before the end
        found[1].step(x, target=target)
    for first, second in zip(*(pipe.parameters() for pipe in found), strict=True):
        assert first.grad is not None
        assert torch.equal(first.grad, second.grad)
    return {way: lambda pipe=pipe: stepped(pipe, x, target) for way, pipe in zip(WAYS, found, strict=True)}


def stepped(pipe: pc.Pipeline, x: torch.Tensor, target: torch.Tensor) -> None:
    pipe.zero_grad()
    pipe.step(x, target=target)


def measure(kind: str, width: int, samples: int, repeats: int, out: Path) -> None:
    """What each rank does; the first one writes down the seconds of each round, and of its waiting."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    x, target = torch.randn(samples, width), torch.randint(0, width, (samples,))
    steps, end = pipelines(kind, width, x, target), GradientReduction.end
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def timed(step: GradientReduction) -> None:
        start = time.perf_counter()
        end(step)
        waited.append(time.perf_counter() - start)

    with patch.object(GradientReduction, "end", timed):
        for turn in range(repeats):
            for way in WAYS[:: 1 - 2 * (turn % 2)]:
                waited: list[float] = []
                dist.barrier()
                start = time.perf_counter()
                steps[way]()
                dist.barrier()
                found[way].append((time.perf_counter() - start, sum(waited)))
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


def launched(ranks: int, kind: str, width: int, samples: int, repeats: int) -> dict[str, list[tuple[float, float]]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
        own = [f"--case={kind},{width},{samples}", f"--repeats={repeats}", f"--out={out}"]
        subprocess.run([*command, *own], env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
        found: dict[str, list[tuple[float, float]]] = json.loads(out.read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--case", help="for a rank: what it runs")
    parser.add_argument("--out", type=Path, help="for a rank: where results go")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    options = parser.parse_args()
    if options.out:
        kind, width, samples = options.case.split(",")
        measure(kind, int(width), int(samples), options.repeats, options.out)
        return
    table = Table("", "ms a step", "at the end", "ratio", "middle half", "ms waiting", "at the end")
    for ranks, kind, width, samples in CASES:
        found = launched(ranks, kind, width, samples, options.repeats)
        (soon, soon_waits), (late, late_waits) = (zip(*found[way], strict=True) for way in WAYS)
        low, ratio, high = statistics.quantiles([a / b for a, b in zip(soon, late, strict=True)], n=4)
        figures = [f"{statistics.median(each) * 1e3:.1f}" for each in (soon, late, soon_waits, late_waits)]
        name = f"{ranks} ranks, {kind}, 8 layers of {width}, batch 2 x {samples}"
        table.add_row(name, *figures[:2], f"{ratio:.3f}", f"{low:.3f} to {high:.3f}", *figures[2:])
    console = Console(record=True, width=130)
    console.print(table)
    if options.markdown:
        head = f"`python benchmarks/overlap.py`, torch {torch.__version__}, {os.cpu_count()} cores, one thread a rank."
        options.markdown.write_text(f"# Gradients of copies\n\n{head}\n\n```\n{console.export_text()}```\n")


if __name__ == "__main__":
    main()
