"""Run CSVs with communication on gloo ranks, by torch's own loader and runtime: `python torch_ranks.py FILE ...`.

Prints the largest distance of a gradient to eager, a line per file. REDUCE_GRAD divides by the number of micro-batches; where a
file has none, the gradients are divided here.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from pipecompile.interchange import read_schedule

WIDTH = 4


def square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def run_rank(rank: int, file: str, n_ranks: int, n_microbatches: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", n_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n_ranks)
    placement = read_schedule(file).schedule.placement
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in placement))
    x, target = torch.randn(2 * n_microbatches, WIDTH), torch.randn(2 * n_microbatches, WIDTH)
    whole = [parameter.detach().clone().requires_grad_() for parameter in layers.parameters()]
    square(torch.func.functional_call(layers, dict(zip(dict(layers.named_parameters()), whole, strict=True)), x), target).backward()  # fmt: skip
    expected = dict(zip(dict(layers.named_parameters()), (parameter.grad for parameter in whole), strict=True))
    own = [stage for stage, device in enumerate(placement) if device == rank]
    stages = [PipelineStage(layers[stage], stage, len(placement), torch.device("cpu")) for stage in own]
    schedule = _PipelineScheduleRuntime(stages, n_microbatches, square)
    schedule._load_csv(file, format="compute_comms")
    inputs = (x,) if placement[0] == rank else ()
    schedule.step(*inputs, **({"target": target} if placement[-1] == rank else {}))
    scale = 1 if any(cell.op == "REDUCE_GRAD" for row in read_schedule(file).rows for cell in row) else n_microbatches
    distances = [
        float((parameter.grad / scale - expected[f"{stage}.{name}"]).abs().max())
        for stage in own
        for name, parameter in layers[stage].named_parameters()
        if parameter.grad is not None
    ]
    assert len(distances) == 2 * len(own)
    Path(f"{folder}/{rank}").write_text(str(max(distances)))
    dist.destroy_process_group()


def main(file: str) -> None:
    schedule = read_schedule(file).schedule
    n_ranks = schedule.n_devices
    with tempfile.TemporaryDirectory() as folder:
        arguments = file, n_ranks, schedule.n_microbatches, folder
        mp.start_processes(run_rank, arguments, nprocs=n_ranks, start_method="fork")
        print(max(float(Path(f"{folder}/{rank}").read_text()) for rank in range(n_ranks)), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for each in sys.argv[1:]:
        main(each)
