"""Part 2 of `make gpu`: four stages on one stream of one card against the plain loop over micro-batches: what does a pipeline cost?

    python benchmarks/gpu_overhead.py [--dry] [probe ...]

Where nothing can overlap, compute-bound steps should take 1.01 of the plain loop at most, launch-bound steps with CUDA graphs 0.35. The
contenders take turns, each compared with the plain loop of the same round. Memory is the most that the allocator had in use
during a step beyond what was there before, beside what the simulator says for the four stages together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
import torch.nn.functional as F
import torchvision
from gpu_probes import Card, Finding, Part, Skipped
from overhead import as_sequential, mlp, plain
from torch import nn

import pipecompile as pc

PART = Part("overhead", "Overhead on one card, against the plain loop and torchgpipe.")
Step = Callable[[], object]
COUNT = 8


def resnet(card: Card) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    model = torchvision.models.resnet18() if card.dry else torchvision.models.resnet50()
    n, side = card.sizes(256, 16), card.sizes(224, 32)
    return model.to(card.device), torch.randn(n, 3, side, side, device=card.device), _targets(card, n)


def small(card: Card) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    return mlp().to(card.device), torch.randn(64, 64, device=card.device), _targets(card, 64)


def _targets(card: Card, n: int) -> torch.Tensor:
    return torch.randint(0, 10, (n,), device=card.device)


def ours(
    card: Card, model: nn.Module, x: torch.Tensor, target: torch.Tensor, **options: object
) -> tuple[pc.Pipeline, Step]:
    pipe = pc.compile(
        copy.deepcopy(model), 4, example_args=(x,), n_microbatches=COUNT, loss_fn=F.cross_entropy,
        devices=card.devices(4), cost="analytic", batch_norm="each", dispatch="inline", **options,
    )  # fmt: skip
    return pipe, lambda: pipe.step(x, target=target)


def ratio(card: Card, base: Step, step: Step) -> float:
    """Return the median of the step's time over that of the plain loop, in turns."""
    ratios = []
    for turn in range(card.sizes(20, 1) + card.sizes(3, 1)):
        times = []
        for one in (base, step):
            card.synchronize()
            start = perf_counter()
            one()
            card.synchronize()
            times.append(perf_counter() - start)
        if turn >= card.sizes(3, 1):
            ratios.append(times[1] / times[0])
    return median(ratios)


@PART.probe("at most 1.01 of the plain loop")
def compute_bound(card: Card) -> Finding:
    model, x, target = resnet(card)
    share = ratio(card, plain(copy.deepcopy(model), x, target, COUNT), ours(card, model, x, target)[1])
    return Finding(f"{share:.3f}", card.dry or share <= 1.01)


@PART.probe("at most 0.35 of the plain loop")
def launch_bound_with_graphs(card: Card) -> Finding:
    model, x, target = small(card)
    share = ratio(
        card, plain(copy.deepcopy(model), x, target, COUNT), ours(card, model, x, target, cuda_graphs=True)[1]
    )
    return Finding(f"{share:.3f}", card.dry or share <= 0.35)


@PART.probe("at most the share with a graph per cell")
def launch_bound_with_a_graph_of_the_step(card: Card) -> Finding:
    """A graph of the whole step beside a pair of graphs per stage and slot, each against the plain loop in turns."""
    model, x, target = small(card)
    base = plain(copy.deepcopy(model), x, target, COUNT)
    cells, whole = (ratio(card, base, ours(card, model, x, target, cuda_graphs=how)[1]) for how in (True, "step"))
    return Finding(
        f"{whole:.3f} with a graph of the step, {cells:.3f} with graphs of cells", card.dry or whole <= cells
    )


@PART.probe()
def launch_bound_without_graphs(card: Card) -> Finding:
    model, x, target = small(card)
    return Finding(f"{ratio(card, plain(copy.deepcopy(model), x, target, COUNT), ours(card, model, x, target)[1]):.3f}")


@PART.probe()
def torchgpipe_compute_bound(card: Card) -> Finding:
    model, x, target = resnet(card)
    try:
        from torchgpipe import GPipe
    except ImportError as error:
        raise Skipped(f"torchgpipe is not installed ({error})") from None
    layers = as_sequential(copy.deepcopy(model))
    balance = [len(layers) // 4 + (i < len(layers) % 4) for i in range(4)]
    pipe = GPipe(layers, balance, devices=card.devices(4), chunks=COUNT, checkpoint="never")
    base = plain(copy.deepcopy(model), x, target, COUNT)
    return Finding(f"{ratio(card, base, lambda: F.cross_entropy(pipe(x), target).backward()):.3f}")


@PART.probe()
def launching_against_computing(card: Card) -> Finding:
    """Return the host's share of a step, by batch size."""
    found = []
    for n in (32, 256) if not card.dry else (4,):
        model, x, target = resnet(card)
        step = ours(card, model, x[:n], target[:n])[1]
        step(), step()
        card.synchronize()
        start = perf_counter()
        step()
        launched = perf_counter() - start
        card.synchronize()
        found.append(f"{n} samples: {launched / (perf_counter() - start):.2f}")
    return Finding(", ".join(found))


@PART.probe("from pageable, page-locked and device memory alike")
def inputs(card: Card) -> Finding:
    model, x, target = resnet(card)
    kinds = {"pageable": (x.cpu(), target.cpu()), "device": (x, target)}
    if not card.dry:
        kinds["page-locked"] = x.cpu().pin_memory(), target.cpu().pin_memory()
    base = ours(card, model, x, target)[1]
    shares = {name: ratio(card, base, ours(card, model, *pair)[1]) for name, pair in kinds.items()}
    return Finding(", ".join(f"{name} {share:.3f}" for name, share in shares.items()))


@PART.probe("within 5 % of simulated")
def memory(card: Card) -> Finding:
    if card.dry:
        raise Skipped("the CPU's allocator counts nothing")
    model, x, target = resnet(card)
    pipe, step = ours(card, model, x, target)
    step(), step()
    card.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    card.synchronize()
    held, said = torch.cuda.max_memory_allocated() - before, sum(pipe.simulate().peak_memory)
    return Finding(f"{held / 2**20:.0f} MiB held, {said / 2**20:.0f} simulated", abs(held / said - 1) <= 0.05)


if __name__ == "__main__":
    PART.main()
