"""Part 4 of `make gpu`: do predicted times hold on the card, and do copies run beside compute?

python benchmarks/gpu_timelines.py [--dry] [probe ...]
"""

from __future__ import annotations

from statistics import median
from time import perf_counter

import torch
import torch.nn.functional as F
import torchvision
from gpu_probes import Card, Finding, Part, Skipped
from torch import nn

import pipecompile as pc
from pipecompile.ir import Kind

PART = Part("timelines", "Predicted against measured: stages, steps, copies.")
COUNT = 8


def piped(
    card: Card, devices: list[torch.device], count: int = COUNT
) -> tuple[pc.Pipeline, torch.Tensor, torch.Tensor]:
    """Return a pipeline with a mini-batch in `count` micro-batches, which have the same size for each count."""
    model: nn.Module = torchvision.models.resnet18() if card.dry else torchvision.models.resnet50()
    n, side = card.sizes(256, 16) * count // COUNT, card.sizes(224, 32)
    x, target = torch.randn(n, 3, side, side), torch.randint(0, 1000, (n,))
    pipe = pc.compile(
        model, 4, example_args=(x,), n_microbatches=count, loss_fn=F.cross_entropy, devices=devices, batch_norm="each",
        cost="analytic" if card.dry else "profile", dispatch="inline",
    )  # fmt: skip
    return pipe, x.to(devices[0]), target.to(devices[-1])


def step_seconds(card: Card, pipe: pc.Pipeline, x: torch.Tensor, target: torch.Tensor) -> float:
    taken = []
    for _ in range(card.sizes(10, 2)):
        card.synchronize()
        start = perf_counter()
        pipe.step(x, target=target)
        card.synchronize()
        taken.append(perf_counter() - start)
    return median(taken[1:])


@PART.probe("median within 3 %")
def stages_as_profiled(card: Card) -> Finding:
    """Compare in one micro-batch: of several, the cells of one card share its multiprocessors, and each lasts longer."""
    pipe, x, target = piped(card, card.devices(4), count=1)
    for _ in range(3):
        pipe.step(x, target=target)
    card.synchronize()
    measured = pipe.measured
    assert measured is not None
    found = []
    for stage in pipe.plan.stages:
        for kind, said in ((Kind.FORWARD, stage.forward), (Kind.BACKWARD, stage.backward)):
            spans = [s for s in measured.spans if s.name.startswith(f"{stage.stage}{kind.value}")]
            found.append(abs(median(s.end - s.start for s in spans) / said - 1))
    return Finding(f"median {median(found):.1%}, largest {max(found):.1%}", card.dry or median(found) <= 0.03)


@PART.probe("within 3 %")
def step_on_one_card(card: Card) -> Finding:
    pipe, x, target = piped(card, card.devices(4))
    busy, taken = pipe.simulate().busy, step_seconds(card, pipe, x, target)
    return Finding(f"{taken / busy - 1:+.1%} of the sum of the cells", card.dry or abs(taken / busy - 1) <= 0.03)


@PART.probe("within 3 %")
def step_on_several_cards(card: Card) -> Finding:
    if card.dry or torch.cuda.device_count() < 4:
        raise Skipped(f"needs 4 GPUs, there are {0 if card.dry else torch.cuda.device_count()}")
    pipe, x, target = piped(card, [torch.device("cuda", i) for i in range(4)])
    said, taken = pipe.simulate().makespan, step_seconds(card, pipe, x, target)
    return Finding(f"{taken / said - 1:+.1%} of simulated", abs(taken / said - 1) <= 0.03)


@PART.probe("95 % of the copies beside compute")
def copies_from_the_host(card: Card) -> Finding:
    if card.dry:
        raise Skipped("the CPU copies nothing")
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    pipe, x, target = piped(card, card.devices(4))
    x, target = x.cpu(), target.cpu()
    for _ in range(3):
        pipe.step(x, target=target)
    card.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        pipe.step(x, target=target)
        card.synchronize()
    events = [e for e in profiler.events() if e.device_type == DeviceType.CUDA]
    copies = [e.time_range for e in events if "Memcpy HtoD" in e.name]
    kernels = sorted((e.time_range.start, e.time_range.end) for e in events if "Memcpy" not in e.name)
    beside = sum(max(0, min(c.end, b) - max(c.start, a)) for c in copies for a, b in kernels)
    share = beside / max(1e-9, sum(c.end - c.start for c in copies))
    return Finding(f"{share:.0%} of {len(copies)} copies", share >= 0.95 * (COUNT - 1) / COUNT)


if __name__ == "__main__":
    PART.main()
