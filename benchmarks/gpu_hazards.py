"""Part 1 of `make gpu`: is what runs right, and does it leave the process as it was?

python benchmarks/gpu_hazards.py [--dry] [probe ...]
"""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_probes import Card, Finding, Part, Skipped
from torch import nn

import pipecompile as pc

PART = Part("hazards", "Correctness and hazards on one card. Aim: 0 failures.")
Tensors = list[torch.Tensor]


def blocks(width: int, depth: int = 8, dropout: float = 0.2) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout)) for _ in range(depth)]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def batch(card: Card, width: int, samples: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, width, device=card.device), torch.randint(0, 10, (samples,), device=card.device)


def piped(card: Card, model: nn.Module, x: torch.Tensor, stages: int = 4, **options: Any) -> pc.Pipeline:
    how = {
        "n_microbatches": 8,
        "loss_fn": F.cross_entropy,
        "cost": "analytic",
        "devices": card.devices(stages),
    } | options
    return pc.compile(model, stages, example_args=(x,), **how)


def trained(card: Card, dropout: float = 0.2, **options: Any) -> Tensors:
    """The parameters after four steps of training."""
    torch.manual_seed(0)
    model = blocks(card.sizes(128, 16), dropout=dropout).to(card.device)
    x, target = batch(card, card.sizes(128, 16))
    pipe = piped(
        card, model, x, **{"dispatch": "inline"} | options
    )  # threads, if they are faster, draw in another order
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        pipe.step(x, target=target)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def same(card: Card, dropout: float = 0.2, **options: Any) -> Finding:
    pairs = zip(trained(card, dropout), trained(card, dropout, **options), strict=True)
    worst = max((a - b).abs().max().item() for a, b in pairs)
    return Finding(f"largest difference {worst:.1e}", worst == 0)


@PART.probe("gradients of eager")
def gradients_are_those_of_eager(card: Card) -> Finding:
    model = blocks(card.sizes(256, 16)).eval().to(card.device)
    x, target = batch(card, card.sizes(256, 16))
    eager = copy.deepcopy(model)
    piped(card, model, x).step(x, target=target)
    F.cross_entropy(eager(x), target).backward()
    pairs = zip(model.parameters(), eager.parameters(), strict=True)
    worst = max(((a.grad - b.grad).abs().max() / b.grad.abs().max()).item() for a, b in pairs)  # type: ignore[operator,union-attr]
    return Finding(f"largest relative difference {worst:.1e}", worst < 1e-3)


def waits_in_a_step(card: Card, where: torch.device) -> list[str]:
    """Return the lines of one step at which the host waits for the card, with a target on `where`."""
    model = blocks(card.sizes(256, 16)).to(card.device)
    x, target = batch(card, card.sizes(256, 16))
    target, pipe = target.to(where), piped(card, model, x)
    for _ in range(3):
        pipe.step(x, target=target)
    card.synchronize()
    with synchronizations_noted(card) as caught:
        pipe.step(x, target=target)
    found = [one for one in caught if "called a synchronizing CUDA operation" in str(one.message)]
    return [f"{Path(one.filename).name}:{one.lineno}" for one in found]


@PART.probe("no wait of the host in a step")
def no_host_wait(card: Card) -> Finding:
    waits = waits_in_a_step(card, torch.device("cpu"))
    return Finding(", ".join(waits) or "none", not waits)


@PART.probe("one wait: labels on the card are counted")
def one_host_wait(card: Card) -> Finding:
    waits = waits_in_a_step(card, card.device)
    return Finding(", ".join(waits) or "none", len(waits) <= 1)


@contextmanager
def synchronizations_noted(card: Card) -> Iterator[list[warnings.WarningMessage]]:
    if not card.dry:
        torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield caught
    finally:
        if not card.dry:
            torch.cuda.set_sync_debug_mode("default")


@PART.probe("the numbers without")
def recomputation(card: Card) -> Finding:
    return same(card, checkpoint="always")


@PART.probe("the numbers of 1f1b")
def zero_bubble(card: Card) -> Finding:
    return same(card, schedule="zb-h1")


@PART.probe("the numbers of one thread")
def threads(card: Card) -> Finding:
    return same(card, dropout=0.0, dispatch="threads")  # threads draw random numbers in another order


@PART.probe("the numbers without")
def graphs(card: Card) -> Finding:
    return same(card, cuda_graphs=True)


@PART.probe("the numbers without")
def graphs_with_recomputation(card: Card) -> Finding:
    return same(card, cuda_graphs=True, checkpoint="always")


@PART.probe("as much memory as before, and a smaller step runs")
def out_of_memory(card: Card) -> Finding:
    if card.dry:
        raise Skipped("the CPU has no limit that can be set")
    model = blocks(4096).to(card.device)
    x, target = batch(card, 4096, 1 << 15)
    pipe = piped(card, model, x)
    pipe.step(x[:512], target=target[:512])
    model.zero_grad()
    torch.cuda.empty_cache()
    before, total = torch.cuda.memory_allocated(), torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**30) / total)
    try:
        pipe.step(x, target=target)
        return Finding("the step had enough memory", False)
    except pc.RunError as error:
        said, kept = "predicted peak" in str(error), torch.cuda.memory_allocated() - before
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    model.zero_grad()
    pipe.step(x[:512], target=target[:512])
    weights = sum(p.nbytes for p in model.parameters())
    return Finding(f"{kept / 2**20:.0f} MiB kept while caught", said and kept < 2 * weights)


class Waits(torch.autograd.Function):
    """Identity that waits for the device while that is captured, on the way there or on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, where: str) -> torch.Tensor:
        ctx.where = where
        _wait(where == "forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        _wait(ctx.where == "backward")
        return gradient, None


def _wait(wanted: bool) -> None:
    if wanted and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()


class Broken(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Waits.apply(x, self.where)


def failed_capture(card: Card, where: str) -> Finding:
    """After a capture that fails: is the stream the same, are there random numbers, is memory found again?"""
    model = nn.Sequential(nn.Linear(64, 64), Broken(where), nn.ReLU(), nn.Linear(64, 10), nn.Dropout(0.1)).to(
        card.device
    )
    x, target = batch(card, 64)
    stream = None if card.dry else torch.cuda.current_stream()
    pipe = piped(card, model, x, 2, n_microbatches=4, cuda_graphs=True)
    for _ in range(4):
        pipe.step(x, target=target)
    numbers = bool(torch.rand(3, device=card.device).isfinite().all())
    restored = card.dry or torch.cuda.current_stream() == stream
    if not card.dry:
        torch.empty(1 << 30, dtype=torch.uint8, device=card.device)
        torch.cuda.empty_cache()
    return Finding(
        f"stream {'restored' if restored else 'NOT restored'}, random numbers {numbers}", restored and numbers
    )


@PART.probe("the process as it was")
def capture_that_fails_in_forward(card: Card) -> Finding:
    return failed_capture(card, "forward")


@PART.probe("the process as it was")
def capture_that_fails_in_backward(card: Card) -> Finding:
    return failed_capture(card, "backward")


@PART.probe("0 failures")
def tests_marked_gpu(card: Card) -> Finding:
    if card.dry:
        raise Skipped("these need a GPU")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--no-header", "-p", "no:cacheprovider"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    return Finding(done.stdout.strip().splitlines()[-1], done.returncode == 0)


if __name__ == "__main__":
    PART.main()
