"""Part 5 of `make gpu`: a machine with a GPU has many cores: a thread per pipeline device on its CPU, in 2 to 16 stages.

python benchmarks/gpu_cores.py [--dry] [probe ...]
"""

from __future__ import annotations

import copy
import os
from statistics import median
from time import perf_counter

import torch
import torch.nn.functional as F
import torchvision
from gpu_probes import Card, Finding, Part, Skipped

import pipecompile as pc

PART = Part("cores", "Threads on many cores: ResNet-101 in stages on the CPU.")
AIMS = {2: 1.6, 4: 3.0, 8: 5.0, 16: 0.0}


def speed_up(card: Card, stages: int) -> Finding:
    cores = len(os.sched_getaffinity(0))
    if cores < stages and not card.dry:
        raise Skipped(f"there are {cores} cores")
    torch.set_num_threads(1)
    model = torchvision.models.resnet18() if card.dry else torchvision.models.resnet101()
    n, side = card.sizes(32, 8), card.sizes(128, 32)
    x, target = torch.randn(n, 3, side, side), torch.randint(0, 1000, (n,))
    taken = []
    for count in (1, stages):
        pipe = pc.compile(
            copy.deepcopy(model), count, example_args=(x,), n_microbatches=card.sizes(16, 4), loss_fn=F.cross_entropy,
            batch_norm="each", cost="analytic" if card.dry else "profile", devices=["cpu"] * count, dispatch="threads",
        )  # fmt: skip
        rounds = []
        for _ in range(card.sizes(3, 2)):
            start = perf_counter()
            pipe.step(x, target=target)
            rounds.append(perf_counter() - start)
        taken.append(median(rounds[1:]))
    share = taken[0] / taken[1]
    return Finding(f"{share:.2f} times one stage", None if card.dry or not AIMS[stages] else share >= AIMS[stages])


def _probes() -> None:
    for stages, aim in AIMS.items():

        def probe(card: Card, stages: int = stages) -> Finding:
            if card.dry and stages > 4:
                raise Skipped("2 and 4 stages are enough for a dry run")
            return speed_up(card, stages)

        probe.__name__ = f"{stages}_stages"
        PART.probe(f"{aim} times" if aim else "")(probe)


_probes()

if __name__ == "__main__":
    PART.main()
