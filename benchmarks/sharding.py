"""Memory and time of a step whose parameters are whole, sharded for the length of a step, or for the length of blocks; beside fully_shard.

    python benchmarks/sharding.py [--ranks 2 4] [--mib 16] [--markdown benchmarks/results/sharding.md]

A tower of 8 blocks of one weight each, in 8 stages. gloo on this machine, a thread per rank. Every row has processes of its own, whose
heap gives freed memory back at once. Measured is the peak of a step (`VmHWM`) less what the rank holds before it, without gradients, on
the rank where that is most. Predicted is the peak that `simulate` counts, with the shards of gradients, which stay.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

import pipecompile as pc

BLOCKS, SAMPLES, STEPS = 8, 32, 5
MIB = 2**20
HEAP = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "OMP_NUM_THREADS": "1"}
"""Blocks from 64 KiB on are mapped, and unmapped when they are freed: what is resident is what is held."""

ROWS = ("dp", "dp_shard, whole step", "dp_shard, by stage", "dp_shard, by stage, ahead=0", "fully_shard per block")


class Block(nn.Module):
    """A weight of `mib` MiB and an activation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).relu()


def tower(mib: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(int((mib * MIB / 4) ** 0.5)) for _ in range(BLOCKS)))


def schedule_of(row: str, n_devices: int) -> pc.Schedule:
    plain = pc.build_schedule("looped-bfs", BLOCKS, 1, n_devices=n_devices)
    return plain if "by stage" not in row else pc.insert_sharding(plain, ahead=0 if "ahead=0" in row else 1)


def step_of(row: str, mib: int, copies: int, n_devices: int) -> tuple[Callable[[], torch.Tensor], Callable[[], object]]:
    """Return a step of this rank, and a function that drops its gradients."""
    model = tower(mib)
    width = model[0].linear.weight.shape[1]
    x, y = torch.randn(2, SAMPLES, width)
    if row.startswith("fully_shard"):
        mesh = init_device_mesh("cpu", (copies,))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

        def torch_step() -> torch.Tensor:
            loss = mse_loss(model(x), y)
            loss.backward()
            return loss.detach()

        return torch_step, model.zero_grad
    mesh = init_device_mesh("cpu", (copies, n_devices), mesh_dim_names=("dp" if row == "dp" else "dp_shard", "pp"))
    pipe = pc.compile(model, BLOCKS, mesh=mesh, schedule=schedule_of(row, n_devices), n_microbatches=1, example_args=(x,),
                      loss_fn=mse_loss, cost="analytic", balance=[1] * BLOCKS)  # fmt: skip

    return lambda: pipe.step(x, target=y), pipe.zero_grad


def resident(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def run_rank(rank: int, row: str, mib: int, copies: int, n_devices: int, folder: str) -> None:
    world = copies * n_devices
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    step, drop_gradients = step_of(row, mib, copies, n_devices)
    growth, seconds = [], []
    for index in range(STEPS):
        drop_gradients()
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
        before, begun = resident("VmRSS"), time.perf_counter()
        loss = step()
        seconds.append(time.perf_counter() - begun)
        if index >= 2:
            growth.append(resident("VmHWM") - before)
    total = torch.tensor([statistics.median(growth), statistics.median(seconds[2:])], dtype=torch.float64)
    dist.all_reduce(total, dist.ReduceOp.MAX)
    if rank == 0:
        result = {"growth": float(total[0]), "seconds": float(total[1]), "loss": float(loss)}
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def measured(row: str, mib: int, copies: int, n_devices: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (row, mib, copies, n_devices, folder), nprocs=copies * n_devices)  # type: ignore[attr-defined]
        return dict(json.loads(Path(folder, "result.json").read_text()))


def predicted(row: str, size: float, copies: int, n_devices: int) -> float | None:
    """Return the bytes by which a step grows on the rank where that is most; None for torch's own. `size` is that of a block in bytes."""
    stages = BLOCKS // n_devices
    if row == "dp":
        return (stages + 1) * size  # gradients, and those of a bucket once more
    if row == "dp_shard, whole step":
        return (2 * stages + stages / copies) * size  # parameters, gradients and their shards
    if row.startswith("fully_shard"):
        return None
    costs = {
        "unsharded_bytes": size,
        "gradient_bytes": size,
        "reduce_grad": 2.0,
    }  # a reduction is over when the next one begins
    timeline = pc.simulate(schedule_of(row, n_devices), **costs)
    return max(_peak(timeline, device, size / copies) for device in range(n_devices))


def _peak(timeline: pc.Timeline, device: int, shard: float) -> float:
    """Return the peak of a device with the shards of the gradients that are reduced."""
    spans = (span for span in timeline.spans if span.device == device and span.name.endswith("REDUCE_GRAD"))
    ends = [span.end for span in spans if span.track == "collectives"]
    return max(total + shard * sum(end <= time for end in ends) for time, total in timeline.memory[device])


def page(mib: int, results: dict[tuple[int, int], dict[str, dict[str, Any]]]) -> str:
    lines = [
        "# Memory and time of a step with sharded parameters",
        "",
        f"Written by `benchmarks/sharding.py --mib {mib}`: {BLOCKS} blocks of {mib} MiB in {BLOCKS} stages, one micro-batch, gloo, torch {torch.__version__}.",
        "*Grows* is the peak of a step less what a rank holds before it, without gradients, on the rank where that is most; *shards* is what stays of it:",
        "the rank's gradients. *Predicted* is what `simulate` counts. Seconds are medians; on CPUs a collective takes cores from the computation.",
        "`simulate` counts no buffers of collectives, so steps by stage grow by more: a reduction copies gradients into a message, and gloo has buffers of its own.",
    ]  # fmt: skip
    for (copies, n_devices), rows in results.items():
        torch_growth = rows.get("fully_shard per block", {}).get("growth")
        lines += [
            "",
            f"## {copies} copies, {n_devices} pipeline device{'s' * (n_devices > 1)}",
            "",
            "| | grows by, MiB | predicted, MiB | shards, MiB | of fully_shard | seconds | loss |",
            "|---|---|---|---|---|---|---|",
        ]
        for row, one in rows.items():
            guess = predicted(row, mib * MIB, copies, n_devices)
            kept = BLOCKS // n_devices * mib / (1 if row == "dp" else copies)
            share = f"{one['growth'] / torch_growth:.2f}" if torch_growth else ""
            text = "" if guess is None else f"{guess / MIB:.1f}"
            lines.append(
                f"| {row} | {one['growth'] / MIB:.1f} | {text} | {kept:.1f} | {share} | {one['seconds']:.2f} | {one['loss']:.6f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mib", type=int, default=16, help="size of a block's weight")
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    arguments = parser.parse_args()
    os.environ.update(HEAP)
    meshes = [(ranks, 1) for ranks in arguments.ranks] + [(2, 2)] * (4 in arguments.ranks)
    results: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
    for copies, n_devices in meshes:
        rows = [row for row in ROWS if n_devices == 1 or not row.startswith("fully_shard")]
        results[copies, n_devices] = {row: measured(row, arguments.mib, copies, n_devices) for row in rows}
    text = page(arguments.mib, results)
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text)


if __name__ == "__main__":
    main()
