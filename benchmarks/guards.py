"""The cost of guards at every step, beside those of torch.compile on the same models, in one run on one thread.

    python benchmarks/guards.py [--markdown benchmarks/results/guards.md]

One check of everything that a recording read, and one check of the guards of torch.compile(model, backend="eager") on the frame that
calls the model. The least of 1,000 rounds of 20 checks counts, because other load on the machine only adds. A step is forward and
backward of the model itself; of three steps, or of 50 of the small model, the median counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn

from pipecompile.tracing.recording import trace

MICRO = 1e6

ROUNDS = 1000
"""Rounds of 20 checks: a third of a second for the small model, longer than a slow phase of a shared processor."""


def mlp() -> tuple[nn.Module, torch.Tensor]:
    """The small MLP of benchmarks/overhead.py."""
    return nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.ReLU())]), torch.randn(64, 64)


def resnet() -> tuple[nn.Module, torch.Tensor]:
    return torchvision.models.resnet50(), torch.randn(8, 3, 224, 224)


def gpt2() -> tuple[nn.Module, torch.Tensor]:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=12)), torch.randint(0, 50257, (8, 64))


MODELS = {"MLP, 8 layers, batch 64": mlp, "ResNet-50, batch 8": resnet, "GPT-2, 12 layers, 8 x 64 tokens": gpt2}


def seconds(function: Callable[[], Any], repeats: int, inner: int = 1) -> float:
    """Return the least seconds of one call: other load on the machine only adds."""
    best = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(inner):
            function()
        best.append((time.perf_counter() - start) / inner)
    return min(best) if inner > 1 else statistics.median(best)


def step_of(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        output = model(x)
        tensor = output if isinstance(output, torch.Tensor) else output.logits
        tensor.square().mean().backward()

    return step


def call(model: nn.Module, x: torch.Tensor) -> Any:
    """The frame whose guards torch.compile checks: everything that the model's forward reads."""
    return model(x)


def torch_guards(model: nn.Module, x: torch.Tensor) -> float | None:
    """Return the seconds of one check of torch.compile's guards on `call`; None if torch has compiled it in several parts."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(call, backend="eager")(model, x)
        entries = _debug_get_cache_entry_list(call.__code__)
        if not entries:
            return None
        check, scope = entries[0].guard_manager.check, {"model": model, "x": x}
        return seconds(lambda: check(scope), ROUNDS, 20) if check(scope) else None


def model_is_large(model: nn.Module) -> bool:
    return sum(p.numel() for p in model.parameters()) > 1_000_000


def row(name: str) -> list[str]:
    torch.manual_seed(0)
    model, x = MODELS[name]()
    reads = trace(model, x).facts.reads
    assert reads is not None
    guards = reads.guards()
    ours = seconds(lambda: guards.fetch.is_unchanged() or guards.hold(), ROUNDS, 20)
    step = seconds(step_of(model, x), 3 if model_is_large(model) else 50)
    theirs = torch_guards(model, x)
    other = "-" if theirs is None else f"{theirs * MICRO:.1f} us"
    return [name, f"{step * 1e3:.2f} ms", f"{ours * MICRO:.1f} us", f"{ours / step:.3%}", other]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "| model | step of the model | pipecompile's guards | of a step | torch.compile's guards |",
        "|---|---|---|---|---|",
    ]
    for name in MODELS:
        lines.append("| " + " | ".join(row(name)) + " |")
        print(lines[-1], flush=True)
    if arguments.markdown:
        arguments.markdown.write_text("# Guards\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
