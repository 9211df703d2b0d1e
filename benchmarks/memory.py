"""Memory as it is simulated against memory as it is held: bytes of tensors per pipeline device, on a CPU.

    python benchmarks/memory.py [--only U-Net] [--markdown benchmarks/results/memory.md]

Every storage that a step makes is counted on the device whose instruction made it, from then until it is freed; the peak is taken
at the ends of instructions. Parameters, their gradients and the mini-batch are not counted, in the simulation neither. What an
operator needs while it runs is nobody's prediction: on a GPU it comes on top.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from trained import SUBJECTS, Subject

import pipecompile as pc
from pipecompile.ir import HOST, Op
from pipecompile.runtime import executable, interpreter
from pipecompile.runtime.interpreter import Code
from pipecompile.runtime.registers import Frame

MODELS = ("ResNet-18, 96 px", "ResNet-50, 64 px", "U-Net, depth 5", "ViT-small, 96 px", "GPT-2, 6 layers")

ROWS = (("gpipe", "never"), ("1f1b", "never"), ("interleaved", "never"), ("zb-h1", "never"), ("1f1b", "always"))


class Ledger(TorchDispatchMode):
    """Whose storage is which, and how much each device has held at most."""

    def __init__(self, n_devices: int) -> None:
        super().__init__()
        self.owned: list[dict[StorageWeakRef, int]] = [{} for _ in range(n_devices)]
        self.peak = [0] * n_devices
        self.device = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_key(tensor) for tensor in pytree.tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(made):
            known = given if isinstance(tensor, torch.Tensor) else None
            if known is not None and (key := _key(tensor)) not in known.union(*self.owned):
                self.owned[self.device][key] = tensor.untyped_storage().nbytes()
        return made

    def run(self, code: Code, frame: Frame) -> None:
        with self:
            for (self.device, index), run in zip(code.order, code.flat, strict=True):
                before, instruction = list(frame.registers), code.program.rows[self.device][index]
                run(frame)
                if instruction.op is Op.RECV and instruction.peer != HOST:
                    received(frame, before)
                del before
                self.owned = [{k: n for k, n in owned.items() if not k.expired()} for owned in self.owned]
                held = [sum(owned.values()) for owned in self.owned]
                self.peak = [max(pair) for pair in zip(self.peak, held, strict=True)]


def received(frame: Frame, before: list[Any]) -> None:
    """A copy in the place of what came, as between devices that have a memory each."""
    for index, (old, new) in enumerate(zip(before, frame.registers, strict=True)):
        if new is not old and isinstance(new, torch.Tensor):
            frame.registers[index] = new.detach().clone().requires_grad_(new.requires_grad)


def _key(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


@contextmanager
def counted(pipe: pc.Pipeline) -> Iterator[Ledger]:
    ledger = Ledger(len(pipe.devices))
    with patch.object(executable, "run_inline", ledger.run):
        yield ledger


def peaks(pipe: pc.Pipeline, step: Callable[[pc.Pipeline], object]) -> list[tuple[float, float]]:
    """Per device the simulated bytes, and the measured ones of a second step, with backwards divided as side by side."""
    with patch.object(interpreter, "may_join_backward", lambda *_: False):
        step(pipe)
        with counted(pipe) as ledger:
            step(pipe)
    return list(zip(pipe.simulate().peak_memory, map(float, ledger.peak), strict=True))


def compiled(subject: Subject, schedule: str, checkpoint: str) -> pc.Pipeline:
    devices = ["cpu"] * (2 if schedule == "interleaved" else 4)
    how = {"schedule": schedule, "checkpoint": checkpoint, "dispatch": "inline", "batch_norm": "each"}
    return subject.compile(4, devices=devices, **how)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the models' names")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    table = Table("", "schedule", "checkpoint", "simulated, MiB per device", "measured, MiB per device", "ratio")
    for model in (name for name in MODELS if options.only in name):
        for schedule, checkpoint in ROWS:
            subject = SUBJECTS[model]()
            found = peaks(compiled(subject, schedule, checkpoint), subject.step)
            said, held = (" ".join(f"{row[k] / 2**20:.1f}" for row in found) for k in (0, 1))
            ratios = " ".join(f"{b / a:.2f}" for a, b in found)
            table.add_row(model, schedule, checkpoint, said, held, ratios)
    console = Console(record=True, width=140)
    console.print(table)
    if options.markdown:
        head = (
            f"# Memory\n\n`python benchmarks/memory.py`, torch {torch.__version__}. Ratio: measured over simulated.\n"
        )
        options.markdown.write_text(f"{head}\n```\n{console.export_text()}```\n")


if __name__ == "__main__":
    main()
