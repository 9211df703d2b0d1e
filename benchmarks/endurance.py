"""Many steps of a small model, over all schedules and checkpoint modes: memory, threads, drift from eager; then faults at random.

    python benchmarks/endurance.py [--steps 2000] [--faults 200] [--markdown benchmarks/results/endurance.md]

Both train with SGD on the same batches, in float64. Memory is the number of live tensors, and the resident set, after a collection.
A fault is an exception in the place of a random instruction, inline or in threads.
"""

from __future__ import annotations

import argparse
import copy
import gc
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pipecompile as pc
from pipecompile.driver.programs import step_executable
from pipecompile.schedules import CATALOGUE, compared_names

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.eager import accumulate, square_loss

STAGES, COUNT = 4, 4
MODES = ("never", "except_last", "always")


class Net(nn.Module):
    """A chain with a skip over all stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(STAGES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = h = self.layers[0](x)
        for layer in self.layers[1:]:
            h = layer(h.tanh())
        return h + first


def piped(model: nn.Module, schedule: str, checkpoint: str, dispatch: str) -> pc.Pipeline:
    chunks = CATALOGUE[schedule].chunks or 1
    return pc.compile(
        model, STAGES, n_microbatches=COUNT, loss_fn=square_loss, cost="analytic", schedule=schedule,
        devices=["cpu"] * (STAGES // chunks), dispatch=dispatch, checkpoint=checkpoint,
    )  # fmt: skip


def state() -> tuple[int, float, int]:
    gc.collect()
    tensors = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
    resident = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return tensors, int(resident.split()[1]) / 1024, threading.active_count()


def endure(steps: int) -> list[str]:
    torch.manual_seed(0)
    names = compared_names()
    model = Net().double()
    eager = copy.deepcopy(model)
    pipes = [piped(model, *each) for each in product(names, MODES, ("inline", "threads"))]
    optimizers = [torch.optim.SGD(each.parameters(), 1e-2) for each in (model, eager)]
    rows = ["| steps | live tensors | resident MiB | threads | furthest from eager |", "|---|---|---|---|---|"]
    for step in range(steps + 1):
        if step >= len(pipes) and step % max(1, (steps - len(pipes)) // 8) == 0:
            tensors, resident, threads = state()
            drift = max(
                float((a - b).detach().abs().max()) for a, b in zip(model.parameters(), eager.parameters(), strict=True)
            )
            rows.append(f"| {step} | {tensors} | {resident:.0f} | {threads} | {drift:.1e} |")
        x = torch.randn(7, 8, dtype=torch.float64)
        for optimizer in optimizers:
            optimizer.zero_grad()
        pipes[step % len(pipes)].step(x)
        accumulate(eager, x, COUNT)
        for optimizer in optimizers:
            optimizer.step()
    return rows


def fail(faults: int) -> list[str]:
    chance, rows = (
        random.Random(0),
        ["| schedule | checkpoint | dispatch | faults | surfaced | next step right |", "|---|---|---|---|---|---|"],
    )
    names = ("gpipe", "1f1b", "zb-h2", "zbv", "dualpipev")
    for schedule, checkpoint, dispatch in product(names, ("never", "always"), ("inline", "threads")):
        torch.manual_seed(0)
        model, x = Net().double(), torch.randn(7, 8, dtype=torch.float64)
        eager = copy.deepcopy(model)
        accumulate(eager, x, COUNT)
        pipe = piped(model, schedule, checkpoint, dispatch)
        pipe.step(x)
        executable, name = (
            step_executable(pipe._cache.latest, COUNT, with_target=False),
            "inline" if dispatch == "inline" else "threaded",
        )
        sound, surfaced, right, number = getattr(executable, name), 0, 0, faults // 20
        for _ in range(number):
            executable.__dict__[name] = harmed(sound, *chance.choice(sound.order))
            try:
                pipe.step(x)
            except pc.RunError as error:
                surfaced += isinstance(error.__cause__, MemoryError)
            executable.__dict__[name] = sound
            model.zero_grad()
            pipe.step(x)
            pairs = zip(model.parameters(), eager.parameters(), strict=True)
            right += all(torch.allclose(a.grad, b.grad, rtol=1e-12) for a, b in pairs)  # type: ignore[arg-type]
        rows.append(f"| {schedule} | {checkpoint} | {dispatch} | {number} | {surfaced} | {right} |")
    return rows


def harmed(code: Any, device: int, index: int) -> Any:
    def raises(_frame: object) -> None:
        raise MemoryError("no memory")

    rows: list[list[Callable[..., None]]] = [list(row) for row in code.rows]
    rows[device][index] = raises
    flat = tuple(raises if place == (device, index) else run for place, run in zip(code.order, code.flat, strict=True))
    return replace(code, rows=tuple(map(tuple, rows)), flat=flat)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    steps, faults = endure(options.steps), fail(options.faults)
    command = f"python benchmarks/endurance.py --steps {options.steps} --faults {options.faults}"
    title = f"`{command}`, torch {torch.__version__}, {time.perf_counter() - start:.0f} s."
    text = "\n".join(["# Endurance", "", title, "", *steps, "", "Faults at random instructions:", "", *faults, ""])
    print(text)
    if options.markdown:
        options.markdown.write_text(text)


if __name__ == "__main__":
    main()
