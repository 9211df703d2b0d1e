"""Faults at every phase of a training on ranks, from compile to the end: what the other ranks raise, and when.

    rank 0   compile: record  cost  plan  split  place  connect   step  step  optimizer  evaluate  gather  save   end
    rank 1   compile: record  cost  plan ✗ killed                 the others: "rank 1 failed before an exchange: its process has ended"

A fault of a kind that ends a rank happens in the midst of a phase. A mistake, such as a batch of another size, is made from there on.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import mse_loss

import pipecompile as pc
from tests.distributed.faults import FORK, Fault, Job, Net, awaited, happen

INSIDE = {
    "record": "pipecompile.driver.phases:_record",
    "cost": "pipecompile.driver.phases:_cost",
    "plan": "pipecompile.driver.phases:_partition",
    "split": "pipecompile.driver.phases:_split",
    "place": "pipecompile.driver.phases:place",
    "connect": "pipecompile.distributed.messages.own_groups:open_own_groups",
    "bind": "pipecompile.distributed.rank_executable:directed_pairs",
    "share": "pipecompile.distributed.agreement.lockstep:_exchanged",
    "seal": "pipecompile.parameters.checkpoint_saving:_gathered",
}
"""Functions of pipecompile before which a fault happens, by phase."""

BETWEEN = (
    "before compile",
    "before a step",
    "loader",
    "optimizer",
    "evaluate",
    "metric",
    "before gathering",
    "before saving",
)
"""Phases of the script itself."""

ENDING = ("raise", "exit", "interrupt", "kill", "_exit", "terminate", "stop")
MISTAKES = (
    "skip",
    "size",
    "dtype",
    "samples",
    "eval",
    "no_grad",
    "autocast",
    "clip",
    "gathered",
    "call",
    "model",
    "options",
    "frozen",
)
"""Kinds of faults. Those of MISTAKES are made before a step, the last three before compile."""

SAID = {
    "raise": r"ValueError: the data are wrong|rank \d+ ended|did not come to it",
    "exit": r"SystemExit: 3|its script has ended|rank \d+ ended|did not come to it",
    "interrupt": "KeyboardInterrupt|its script has ended by KeyboardInterrupt|did not come to it|ended",
    "kill": r"its process has ended|the connection to it is gone|rank \d+ ended|did not come to it",
    "stop": "silent for|did not take part|did not open its connections|did not come to it|did not answer",
    "model": "graph of the model",
    "options": "options of compile|graph of the model|program",
    "frozen": "",
    "skip": "different samples|different things",
    "samples": "different samples",
}
"""What the errors of other ranks say of the cause. A mistake without an entry: that ranks are asked for different things."""


@dataclass(frozen=True)
class PhaseFault:
    """A fault of a kind in a phase of rank `rank`, of `world` ranks in `copies` of a pipeline; `timeout` in seconds."""

    phase: str
    kind: str
    rank: int
    world: int
    copies: int = 1
    schedule: str = "1f1b"
    timeout: float = 6.0


SAMPLE = {
    "stopped before connections are open": PhaseFault("connect", "stop", 1, 2, timeout=3.0),
    "killed in a save": PhaseFault("seal", "kill", 1, 2),
    "uncaught before a save": PhaseFault("before saving", "raise", 0, 2, timeout=3.0),
    "uncaught between copies": PhaseFault("split", "raise", 3, 4, copies=2),
    "killed in one copy before a save": PhaseFault("before gathering", "kill", 1, 4, copies=2),
    "skipped a step": PhaseFault("before a step", "skip", 1, 2),
}
"""Faults that were not told, or with blame on another rank, or after twice the timeout, once."""


class Script:
    """The training of one rank, with the fault."""

    def __init__(self, fault: PhaseFault, rank: int, folder: Path) -> None:
        self.fault, self.folder, self.is_faulty, self.done = fault, folder, rank == fault.rank, False
        self.rank = rank

    def at(self, phase: str) -> None:
        """Let the fault happen if this is its phase."""
        if self.is_faulty and phase == self.fault.phase and self.fault.kind in ENDING and not self.done:
            self.done = True
            (self.folder / "struck").write_text(str(time.time()))
            happen(Job("1f1b", self.fault.world, Fault(self.fault.kind, self.rank, 0, 0), self.fault.timeout))

    def errs(self, kind: str) -> bool:
        """Return whether this rank makes a mistake of a kind now."""
        is_now = self.is_faulty and self.fault.kind == kind
        if is_now and not self.done:
            self.done = True
            (self.folder / "struck").write_text(str(time.time()))
        return is_now

    def patch(self) -> None:
        """Put the fault before a function of pipecompile."""
        module, _, name = INSIDE.get(self.fault.phase, "").partition(":")
        if self.is_faulty and module:
            function = getattr(import_module(module), name)
            setattr(import_module(module), name, self.before(function))

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.at(self.fault.phase)
            return function(*args, **kwargs)

        return run

    def batches(self, count: int) -> Iterator[torch.Tensor]:
        torch.manual_seed(1)
        part = self.rank // (self.fault.world // self.fault.copies)
        for number, x in enumerate(
            torch.randn(count + 1, 8 * self.fault.copies, 8).unflatten(1, (self.fault.copies, 8))
        ):
            if number == 2:
                self.at("loader")
            if number != 1 or not self.errs("skip"):
                yield x[part] + (torch.arange(8.0) if number == 1 and self.errs("samples") else 0.0)

    def run(self) -> None:
        self.patch()
        pipe = self.compiled()
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        for number, x in zip(range(4), self.batches(4), strict=False):
            self.at("before a step")
            self.step(pipe, x, number)
            self.at("optimizer")
            optimizer.step()
            optimizer.zero_grad()
        pipe.evaluate(self.evaluated(), self.metric)
        self.at("before gathering")
        pipe.full_state_dict()
        self.at("before saving")
        pc.save_checkpoint({"model": pipe.state_dict()}, self.folder / "saved", 4)

    def metric(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.at("metric")
        return (output - target).abs().mean()

    def evaluated(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for x in self.batches(2):
            self.at("evaluate")
            yield x, x.roll(1)

    def compiled(self) -> Any:
        fault, per = self.fault, self.fault.world // self.fault.copies
        mesh = None
        if fault.copies > 1:
            mesh = DeviceMesh("cpu", torch.arange(fault.world).view(fault.copies, per), mesh_dim_names=("dp", "pp"))
        self.at("before compile")  # a rank that is gone when a mesh is made is torch's matter
        torch.manual_seed(0)
        n_stages = per * (2 if fault.schedule in ("zbv", "interleaved") else 1)
        model = Net(n_stages + 1 + self.errs("model"))
        if self.errs("frozen"):
            model.layers[1].weight.requires_grad_(requires_grad=False)
        count = 2 if self.errs("options") else 4
        return pc.compile(model, n_stages, n_microbatches=count, loss_fn=mse_loss, schedule=fault.schedule, cost="analytic",
                          tied="apart", mesh=mesh, example_args=(torch.randn(8, 8),))  # fmt: skip

    def step(self, pipe: Any, x: torch.Tensor, number: int) -> None:
        if number == 2:
            x = x[:4] if self.errs("size") else x.double() if self.errs("dtype") else x
            if self.errs("eval"):
                pipe.eval()
            for kind, call in (
                ("clip", lambda: pipe.clip_grad_norm_(1.0)),
                ("gathered", pipe.gathered),
                ("call", lambda: pipe(x)),
            ):
                if self.errs(kind):
                    with torch.no_grad():
                        call()
        has_gradients = not (number == 2 and self.errs("no_grad"))
        with (
            torch.set_grad_enabled(has_gradients),
            torch.autocast("cpu", enabled=number == 2 and self.errs("autocast")),
        ):
            loss = pipe.step(x, target=x.roll(1))
        with (self.folder / f"{self.rank}.losses").open("a") as out:
            out.write(f"{loss.item()!r}\n")


def tried(fault: PhaseFault, folder: Path, patience: float = 60.0) -> tuple[list[str], list[str], float]:
    """Run the script with a fault. Return what is wrong, what each rank said, and the seconds until the last other rank said it."""
    lines = [FORK.Pipe(duplex=False) for _ in range(fault.world)]
    ranks = [FORK.Process(target=_rank, args=(fault, rank, line, folder)) for rank, (line, _) in enumerate(lines)]
    for process in ranks:
        process.start()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    for _, line in lines:
        line.send(store.port)
    awaited(ranks, patience)
    for process in ranks:
        process.kill()
        process.join()
    files = [folder / f"{rank}.json" for rank in range(fault.world)]
    said = [json.loads(file.read_text()) if file.exists() else ["no end", 0.0] for file in files]
    if not (folder / "struck").exists():
        return ["no fault happened"], [text for text, _ in said], 0.0
    struck = float((folder / "struck").read_text())
    late = max(at - struck for rank, (_, at) in enumerate(said) if rank != fault.rank)
    wrong = [f"rank {r}: {w}" for r, (text, at) in enumerate(said) for w in _faults_of(fault, r, text, at - struck)]
    return wrong, [text for text, _ in said], late


def _rank(fault: PhaseFault, rank: int, line: Connection, folder: Path) -> None:
    os.dup2(os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT), 2)
    store = dist.TCPStore("127.0.0.1", line.recv(), is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=fault.world, timeout=timedelta(seconds=fault.timeout)
    )
    try:
        Script(fault, rank, folder).run()
        said = "ended well"
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
        at = time.time()
        if isinstance(error, Exception | KeyboardInterrupt):
            sys.last_value = error  # a child of multiprocessing does neither
            sys.excepthook(type(error), error, error.__traceback__)
        if rank == fault.rank and isinstance(error, SystemExit):
            raise
    else:
        at = time.time()
    file = folder / f"{rank}.json"
    file.with_suffix(".part").write_text(json.dumps([said, at]))
    file.with_suffix(".part").rename(file)


def _faults_of(fault: PhaseFault, rank: int, text: str, seconds: float) -> list[str]:
    """Return what is wrong with what a rank said after so many seconds: blame, cause or time; nothing of the faulty rank itself."""
    if fault.kind in ENDING and rank == fault.rank:
        return []
    if fault.kind == "frozen" and text == "ended well":
        return []  # a parameter of one rank alone: its stages train it or not
    wrong = [text] if text in ("ended well", "no end") else []
    if seconds > fault.timeout + 2:
        wrong.append(f"{seconds:.1f} s")
    blamed = {
        int(number)
        for number in re.findall(r"rank (\d+) failed|rank (\d+) ended|rank (\d+) did not", text)
        for number in number
        if number
    }
    if fault.kind in ENDING and blamed != {fault.rank}:
        wrong.append(f"blame on {sorted(blamed)}: {text:.300}")
    if fault.kind not in ENDING and (blamed - {fault.rank} or not re.search(rf"ranks? [\d, ]*\b{fault.rank}\b", text)):
        wrong.append(f"not named: {text:.300}")
    kind = {"_exit": "kill", "terminate": "kill"}.get(fault.kind, fault.kind)
    causes = SAID.get(kind, "asked for different things|disagree about")
    if fault.phase == "before compile":  # nothing is known of a rank that has compiled nothing
        causes += "|did not take part in the exchange"
    if not re.search(causes, text):
        wrong.append(f"cause: {text:.300}")
    return wrong


def sample(folder: Path) -> dict[str, list[str]]:
    """Return what is wrong after each of SAMPLE."""
    folders = {name: folder / f"phase {number}" for number, name in enumerate(SAMPLE)}
    for path in folders.values():
        path.mkdir()
    return {name: tried(fault, folders[name])[0] for name, fault in SAMPLE.items()}
