"""A whole training script for several copies of a pipeline: the same losses on any number of processes, in any mesh of them.

torchrun --standalone --nproc-per-node=2 examples/train_copies.py --copies 2

It has parts of each batch per copy (the last one is small, and empty on some copies), gradient accumulation, clipping, a schedule of
learning rates, mixed precision, an average of the weights, validation over all copies, the best model in a file, and one log.
"""

import argparse
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import init_device_mesh
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import pipecompile as pc

ACCUMULATED = 2  # batches for one step of the optimizer


def loss_of(scores: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss, and beside it the number of samples that are right."""
    return cross_entropy(scores, target) / ACCUMULATED, (scores.argmax(1) == target).sum()


def main() -> None:
    options = parse_options()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    stages = dist.get_world_size() // options.copies
    mesh = init_device_mesh("cpu", (options.copies, stages), mesh_dim_names=("dp", "pp"))
    is_first = dist.get_rank() == 0

    torch.manual_seed(0)  # the same weights and the same order of samples on every rank
    model = nn.Sequential(
        nn.Linear(20, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 5)
    )
    x, y = data(1000 + 250)
    pipe = pc.compile(
        model,
        stages,
        mesh=mesh,
        example_args=(x[:64],),
        loss_fn=loss_of,
        has_aux=True,
        n_microbatches=4,
        cost="analytic",
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)  # those of this rank's stage
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    average = AveragedModel(pipe, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # of this rank's stage as well
    best = 0.0

    for epoch in range(options.epochs):
        pipe.train()
        order = torch.randperm(1000)
        total, right = 0.0, 0
        batches = [*parts(x, y, order, options.batch, mesh, pipe)]
        for number, (inputs, target) in enumerate(batches, 1):
            is_last = number % ACCUMULATED == 0 or number == len(batches)
            with (
                torch.autocast("cpu", torch.bfloat16, enabled=options.amp),
                nullcontext() if is_last else pipe.no_sync(),
            ):
                loss, counts = pipe.step(inputs, target=target)  # the loss of the whole batch, on every rank
            total, right = total + ACCUMULATED * loss.item(), right + int(sum(counts))  # counts: of this copy's part
            if is_last:
                pipe.clip_grad_norm_(1.0)  # the norm over all ranks
                optimizer.step()
                optimizer.zero_grad()
                average.update_parameters(pipe)
        scheduler.step()
        right = pipe.sum_over_copies(right)  # on all ranks

        held_out = parts(x, y, torch.arange(1000, len(x)), options.batch, mesh, pipe)
        validation = average.module.evaluate(held_out, accuracy)  # of all copies, on every rank
        if is_first:
            print(f"epoch {epoch}  loss {total / len(batches):.4f}  right {right / 1000:.1%}  "
                  f"validation {ACCUMULATED * validation.loss:.4f} {validation.metrics['right']:.1%}", flush=True)  # fmt: skip
        if validation.metrics["right"] > best:  # the same on every rank, so all ranks take this branch
            best = validation.metrics["right"]
            state = average.module.full_state_dict()  # under the model's own names
            if is_first and options.out:
                options.out.mkdir(parents=True, exist_ok=True)
                torch.save(state, options.out / "best.pt")
    dist.destroy_process_group()


def accuracy(scores: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"right": (scores.argmax(1) == target).double().mean()}


def parts(
    x: torch.Tensor, y: torch.Tensor, order: torch.Tensor, size: int, mesh: dist.DeviceMesh, pipe: pc.Pipeline
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield this copy's part of every batch. A rank that needs no inputs or no targets loads none, but zeros of their shape."""
    for batch in order.split(size):
        part = batch.tensor_split(mesh["dp"].size())[mesh.get_local_rank("dp")]
        inputs = x[part] if pipe.needs_inputs else torch.zeros(len(part), 20)
        yield inputs, y[part] if pipe.needs_targets else torch.zeros(len(part), dtype=torch.long)


def data(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random points, and the classes that a random network gives them."""
    x = torch.randn(samples, 20)
    teacher = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5))
    with torch.no_grad():
        return x, teacher(x).argmax(1)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=1, help="copies of the pipeline; the other processes are stages")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=83, help="samples in a batch, of all copies together")
    parser.add_argument("--amp", action="store_true", help="bfloat16 where autocast takes it")
    parser.add_argument("--out", type=Path, help="directory for the best weights")
    return parser.parse_args()


if __name__ == "__main__":
    main()
