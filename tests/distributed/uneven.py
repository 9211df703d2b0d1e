"""Parts of a batch that differ in samples between copies of a pipeline, down to none: every rank compares its steps with one process.

python tests/distributed/uneven.py WORLD prints, as JSON, per case a list with the result of each rank.
"""

from __future__ import annotations

import copy
import json
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[2]))

import pipecompile as pc
from pipecompile.batching.batch_dims import sizes
from pipecompile.graph import backward_split
from tests.distributed.faults import FORK, warm

TIMEOUT, COUNT, WIDTH = 60.0, 4, 6
PARTS = ((4, 2), (3, 0), (8, 8), (1, 5), (0, 7), (4, 4))
"""Samples of the parts of two copies, step after step: the first is compiled for."""

OF_TWO = ((8, 8), (4, 6), (5, 0), (0, 7), (3, 2), (4, 4))
"""Parts in micro-batches of two samples and more, for BatchNorm."""


class Masked(nn.Module):
    """A loss over the values that a mask selects."""

    def forward(self, y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = target[:, :1] > 0
        return (((y - target).square().sum(1, keepdim=True) * mask).sum()) / mask.sum().clamp(min=1)


def square(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y - target).square().mean()


def squares(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y - target).square().sum()


def of_classes(y: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
    labels = (target[:, 0] * 7).long().remainder(5)
    return nn.functional.cross_entropy(y[:, :5], labels.masked_fill(labels == 1, -100), **options)


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "mean": square,
    "sum": squares,
    "masked": Masked(),
    "ignored": nn.CrossEntropyLoss(ignore_index=1),
    "weighted": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 0.5, 2.0, 3.0, 0.1, 1.0]).double()),
    "smoothed": nn.CrossEntropyLoss(label_smoothing=0.1),
}


def layers(kind: str = "plain") -> nn.Module:
    torch.manual_seed(0)
    norms = [[nn.BatchNorm1d(WIDTH)] if kind == "norm" else [] for _ in range(2)]
    blocks = ([nn.Linear(WIDTH, WIDTH, bias=not norm), *norm, nn.Tanh()] for norm in norms)
    return nn.Sequential(*(layer for block in blocks for layer in block), nn.Linear(WIDTH, WIDTH)).double()


def mesh_of(name: str = "dp") -> DeviceMesh:
    ranks = torch.arange(dist.get_world_size()).view(2, -1)
    return DeviceMesh("cpu", ranks, mesh_dim_names=(name, "pp"))


def batch(step: int, loss: str, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(100 + step)
    x = torch.randn(samples, WIDTH).double()
    is_of_classes = isinstance(LOSSES[loss], nn.CrossEntropyLoss)
    return x, torch.randint(0, WIDTH, (samples,)) if is_of_classes else torch.randn(samples, WIDTH).double()


def compiled(model: nn.Module, x: torch.Tensor, mesh: DeviceMesh, loss: str, **options: Any) -> Any:
    reduction = "sum" if loss == "sum" else "mean"
    return pc.compile(model, mesh["pp"].size(), mesh=mesh, example_args=(x,), loss_fn=LOSSES[loss], n_microbatches=COUNT,
                      cost="analytic", loss_reduction=reduction, **options)  # fmt: skip


def trained(
    name: str = "dp", loss: str = "mean", kind: str = "plain", *, placeholders: bool = False, **options: Any
) -> float:
    """Return the largest difference to one process, in losses, norms, gradients and weights; two backwards for each optimizer step."""
    model, mesh = layers(kind), mesh_of(name)
    eager, here, all_parts = copy.deepcopy(model), mesh.get_local_rank(name), OF_TWO if kind == "norm" else PARTS
    one = pc.compile(eager, 1, devices=["cpu"], loss_fn=LOSSES[loss], cost="analytic", n_microbatches=1,
                     batch_norm=options.get("batch_norm"), loss_reduction="sum" if loss == "sum" else "mean")  # fmt: skip
    pipe = compiled(model, batch(0, loss, all_parts[0][here])[0], mesh, loss, **options)
    mine, theirs = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (pipe, eager))
    off = list[float]()
    for step, parts in enumerate(all_parts):
        (x, y), start = batch(step, loss, sum(parts)), parts[0] * here
        part = slice(start, start + parts[here])
        mine_x = x[part] if not placeholders or pipe.needs_inputs else torch.zeros_like(x[part])
        value = pipe.step(
            mine_x, target=y[part] if not placeholders or pipe.needs_targets else torch.zeros_like(y[part])
        )
        off.append(float(value - one.step(microbatches=divided(x, y, parts, 1 + (kind == "norm")))))
        if step % 2:
            norms = pipe.clip_grad_norm_(0.5), nn.utils.clip_grad_norm_(eager.parameters(), 0.5)
            off.append(float(norms[0] - norms[1]))
            off += differences(pipe, eager, gradients=True)
            for optimizer in (mine, theirs):
                optimizer.step()
                optimizer.zero_grad()
    return max(map(abs, [*off, *differences(pipe, eager)]))


def divided(
    x: torch.Tensor, y: torch.Tensor, parts: Sequence[int], least: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the micro-batches of all copies as one list."""
    counts = [size for part in parts if part for size in sizes(part, min(COUNT, part // least))]
    return [*zip(x.split(counts), y.split(counts), strict=True)]


def differences(pipe: Any, eager: nn.Module, *, gradients: bool = False) -> list[float]:
    expected = dict((*eager.named_parameters(), *eager.named_buffers()))
    own = dict((*pipe.named_parameters(), *(() if gradients else pipe.named_buffers())))
    if gradients:
        own, expected = ({name: one.grad for name, one in each.items()} for each in (own, expected))
    whole = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in own.items()}
    return [float((one - expected[name]).abs().max()) for name, one in whole.items()]


def alone() -> float:
    """Call copy 0 alone, in recordings that copy 1 never makes, then step both. Return the largest difference to eager."""
    model, mesh = layers(), mesh_of()
    eager, here = copy.deepcopy(model), mesh.get_local_rank("dp")
    x, y = batch(0, "mean", 8)
    pipe, off = compiled(model, x[:4], mesh, "mean"), []
    for step in range(2):
        if here == 0:
            for mode, samples in ((False, 8), (True, 3), (False, 1)):
                for each in (pipe, eager):
                    each.train(mode)
                with torch.no_grad():
                    off.append(float((pipe(x[:samples] + step) - eager(x[:samples] + step)).abs().max()))
            state = pipe.full_state_dict()
            off += [float((state[name] - value).abs().max()) for name, value in eager.state_dict().items()]
        pipe.train()
        part = slice(0, 3) if here == 0 else slice(3, 8)
        whole = square(eager(x), y)
        whole.backward()
        off.append(float(pipe.step(x[part], target=y[part]) - whole))
    return max(map(abs, [*off, *differences(pipe, eager, gradients=True)]))


def evaluated(name: str) -> list[Any]:
    """Evaluate 3 batches on one copy and 1 on the other, with placeholders; then nothing on copy 1. Return differences and results."""
    model, mesh = layers(), mesh_of(name)
    eager, here = copy.deepcopy(model).eval(), mesh.get_local_rank(name)
    loader = [batch(step, "ignored", samples) for step, samples in enumerate((4, 4, 1, 6))]
    pipe = compiled(model, loader[0][0], mesh, "ignored")
    mine = [
        (x if pipe.needs_inputs else torch.zeros_like(x), y if pipe.needs_targets else torch.zeros_like(y))
        for x, y in (loader[:3], loader[3:])[here]
    ]
    empty = (mine[0][0][:0], mine[0][1][:0])
    off: list[float] = []
    for batches, used in (((mine, [*mine, empty])[here], loader), ((mine, ())[here], loader[:3])):
        result = pipe.evaluate(batches, right)
        with torch.no_grad():
            rows = [(len(x), LOSSES["ignored"](eager(x), y), right(eager(x), y)) for x, y in used]
        total = sum(count for count, *_ in rows)
        off += [result.samples - total, result.loss - float(sum(n * loss for n, loss, _ in rows)) / total]
        off.append(result.metrics["metric"] - float(sum(n * metric for n, _, metric in rows)) / total)
        off.append(result.loss - pipe.evaluate(batches).loss)
    assert pipe.training
    return [max(map(abs, off)), str(error_of(lambda: pipe.evaluate(())))]


def right(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).double().mean()


def error_of(call: Callable[[], Any]) -> Exception | None:
    try:
        call()
    except pc.PipecompileError as error:
        return error
    return None


def averaged() -> float:
    """Average the weights of a pipeline beside its training. Return the largest difference to eager, in weights and outputs."""
    model, mesh = layers(), mesh_of()
    eager, here = copy.deepcopy(model), mesh.get_local_rank("dp")
    x, y = batch(0, "mean", 8)
    part = slice(0, 3) if here == 0 else slice(3, 8)
    pipe = compiled(model, x[part], mesh, "mean")
    mean = torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    averages = [torch.optim.swa_utils.AveragedModel(each, multi_avg_fn=mean) for each in (pipe, eager)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (pipe, eager)]
    for _ in range(3):
        pipe.step(x[part], target=y[part])
        square(eager(x), y).backward()
        for average, optimizer, each in zip(averages, optimizers, (pipe, eager), strict=True):
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(each)
    off = differences(averages[0].module, averages[1].module)
    state = averages[0].module.full_state_dict()
    off += [float((state[name] - value).abs().max()) for name, value in averages[1].module.state_dict().items()]
    saved = {name: value.clone() for name, value in averages[0].state_dict().items()}
    assert {name.removeprefix("module.") for name in saved} == {"n_averaged", *pipe.state_dict()}
    for parameter in averages[0].parameters():
        parameter.detach().zero_()
    averages[0].load_state_dict(saved)
    assert [*map(id, averages[0].parameters())] == [*map(id, averages[0].module.parameters())]
    with torch.no_grad():
        off.append(float((averages[0](x) - averages[1](x)).abs().max()))
        off.append(float(averages[0].module.evaluate([(x[part], y[part])]).loss - square(averages[1](x), y)))
    return max(map(abs, [*off, *differences(pipe, eager)]))


def aux(y: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return square(y, target), (y > 0).sum()


def counted() -> Any:
    """Return a difference of sums over the copies, one of them without samples, to eager; and what is refused."""
    model, mesh = layers(), mesh_of()
    eager, here = copy.deepcopy(model), mesh.get_local_rank("dp")
    x, y = batch(0, "mean", 5)
    pipe = pc.compile(model, mesh["pp"].size(), mesh=mesh, example_args=(x,), loss_fn=aux, has_aux=True, cost="analytic",
                      n_microbatches=COUNT)  # fmt: skip
    loss, counts = pipe.step(x, target=y) if here == 0 else pipe.step(x[:0], target=y[:0])
    again, none = pipe.step(microbatches=[(x, y)] if here == 0 else [])
    sums = pipe.sum_over_copies(
        {"positive": sum(counts, torch.tensor(0)), "seen": len(x) if here == 0 else 0, "half": 0.5}
    )
    off = [float(value - square(eager(x), y)) for value in (loss, again)]
    off += [float(sums["positive"] - (eager(x) > 0).sum()), sums["seen"] - 5, sums["half"] - 1.0]
    errors = [
        error_of(lambda: pipe.step(x[:0], target=y[:0])),
        error_of(lambda: pipe.sum_over_copies({"a" if here == 0 else "b": 1.0})),
    ]
    assert (none == []) is (here == 1)
    off.append(float(pipe.step(x, target=y)[0] - square(eager(x), y)))  # after errors that all copies raised
    errors.append(error_of(lambda: pipe.step(x[:0], target=y)))  # which ends the pipeline
    return [max(map(abs, off)), *map(str, errors)]


CASES: dict[str, Callable[[], Any]] = {
    "alone": alone,
    "averaged": averaged,
    "counted": counted,
    "evaluated": lambda: evaluated("dp"),
    "evaluated, dp_shard": lambda: evaluated("dp_shard"),
    **{f"{name}, {loss}": lambda name=name, loss=loss: trained(name, loss) for name in ("dp", "dp_shard") for loss in LOSSES},
    **{f"schedule {schedule}": lambda schedule=schedule: trained(schedule=schedule, loss="ignored")
       for schedule in ("gpipe", "1f1b", "zb-h1")},
    **{f"placeholders, {loss}": lambda loss=loss: trained(loss=loss, placeholders=True) for loss in ("mean", "masked", "ignored")},
    "checkpoint": lambda: trained(checkpoint="always", loss="weighted"),
    "norm": lambda: trained(kind="norm", batch_norm="deferred"),
    "norm, dp_shard": lambda: trained("dp_shard", kind="norm", batch_norm="deferred"),
}  # fmt: skip


def _rank(rank: int, world: int, line: Connection, results: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    backward_split.MIN_WEIGHT_FLOPS["cpu"] = 0.0  # every weight is worth a W
    store = dist.TCPStore("127.0.0.1", line.recv(), is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT))
    said: dict[str, Any] = {}
    only = sys.argv[2:]
    for name, case in CASES.items():
        if only and name not in only:
            continue
        try:
            said[name] = case()
        except Exception:
            said[name] = traceback.format_exc()
            break  # the process groups may have messages under way
    results.put((rank, said))
    dist.destroy_process_group()


def main() -> None:
    warm()
    world = int(sys.argv[1])
    lines, results = [FORK.Pipe(duplex=False) for _ in range(world)], FORK.Queue()
    ranks = [FORK.Process(target=_rank, args=(rank, world, lines[rank][0], results)) for rank in range(world)]
    for process in ranks:
        process.start()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    for _, line in lines:
        line.send(store.port)
    by_rank = dict(results.get(timeout=500) for _ in ranks)
    for process in ranks:
        process.join(20)
        process.kill()
    names = {name: None for said in by_rank.values() for name in said}
    print(json.dumps({name: [by_rank[rank].get(name) for rank in range(world)] for name in names}))


if __name__ == "__main__":
    main()
