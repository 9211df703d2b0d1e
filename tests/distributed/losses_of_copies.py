"""Trainings on ranks of several copies of a pipeline, of which some are lost: what each rank says, and what one process computes.

    step        0     1     2 ✗ rank 3     2 again    3    4
    copy 0      x     x     x              x          x    x        equal to a loop of one process over these samples
    copy 1      x     x     raises

python tests/distributed/losses_of_copies.py FOLDER NAME ... prints, as JSON, what is wrong with each trial.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import mse_loss

import pipecompile as pc
from pipecompile.distributed.data_parallel.call_outcome import CallOutcome
from pipecompile.distributed.data_parallel.gradient_reduction import GradientReduction
from tests.distributed.faults import FORK, warm
from tests.distributed.lanes import in_lanes

STEPS, PART, COUNT, WIDTH = 5, 6, 3, 6
"""Steps of a training, samples and micro-batches of the part of a copy, and features of a sample."""


@dataclass(frozen=True)
class Loss:
    """The end of a rank in a phase of a step: kind "kill", "_exit", "raise" or "stop"."""

    kind: str
    phase: str
    rank: int
    step: int = 2


@dataclass(frozen=True)
class Lossy:
    """A training in copies of two ranks each, which loses some. `ends` are the ranks of which the others say that they ended it."""

    copies: int
    losses: tuple[Loss, ...]
    schedule: str = "1f1b"
    timeout: float = 60.0
    batch_norm: str = "each"
    ends: tuple[int, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether a step in which a rank ends may count: the rank was past its part."""
        return any(loss.phase == "at the outcome" for loss in self.losses)

    def left(self, step: int) -> tuple[int, ...]:
        """Return the copies whose samples are in a step. What fails after the step, in the optimizer, is lost in the next one."""
        gone = {
            loss.rank // 2
            for loss in self.losses
            if loss.step < step or (loss.step == step and loss.phase not in ("clip", "optimizer", "evaluate", "save"))
        }
        return tuple(number for number in range(self.copies) if number not in gone)


TRIALS = {
    "killed at a forward": Lossy(2, (Loss("kill", "forward", 3),)),
    "raised at a forward": Lossy(2, (Loss("raise", "forward", 3),), "gpipe"),
    "left in the reduction": Lossy(2, (Loss("_exit", "reduction", 1),), "zbv", batch_norm="deferred"),
    "killed before it is past its part": Lossy(2, (Loss("kill", "before the outcome", 2),)),
    "killed when it is past its part": Lossy(2, (Loss("kill", "at the outcome", 3),), "gpipe"),
    "raised in the optimizer": Lossy(2, (Loss("raise", "optimizer", 2),)),
    "stopped, and woken later": Lossy(2, (Loss("stop", "forward", 3),), "gpipe", timeout=10.0),
    "three, two, one": Lossy(3, (Loss("kill", "forward", 5, 1), Loss("kill", "loader", 2, 3))),
    "the last copy": Lossy(2, (Loss("kill", "forward", 3, 1), Loss("kill", "forward", 1, 3)), ends=(1,)),
}
"""Trials by name."""

FULL = {
    "two at once": Lossy(3, (Loss("kill", "forward", 3), Loss("kill", "forward", 5))),
    "killed in a validation": Lossy(2, (Loss("kill", "evaluate", 3),)),
    "killed in a save": Lossy(2, (Loss("kill", "save", 3),)),
    "killed before the norm": Lossy(3, (Loss("kill", "clip", 5),), "zbv"),
    "the first copy": Lossy(2, (Loss("kill", "forward", 1),), "gpipe", batch_norm="deferred"),
} | {
    f"{kind}, {phase}, {schedule}": Lossy(2, (Loss(kind, phase, 3),), schedule, 10.0 if kind == "stop" else 60.0)
    for kind in ("kill", "raise", "_exit", "stop")
    for phase in ("loader", "forward", "reduction", "before the outcome", "optimizer")
    for schedule in ("gpipe", "1f1b", "zbv")
}
"""Further trials, with `--full` alone."""


class Net(nn.Module):
    """Layers with running statistics and random numbers on the second rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[1](self.layers[0](x).tanh()).tanh()
        x = self.layers[2](x).tanh()
        return self.layers[3](self.dropout(self.norm(x)))


def data(step: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the samples and targets of a copy in a step, and set the seed of what it draws."""
    torch.manual_seed(100 * step + number)
    x, y = torch.randn(PART, WIDTH), torch.randn(PART, WIDTH)
    torch.manual_seed(step)
    return x, y


# -- on ranks ---------------------------------------------------------------------------------------------------------


class Training:
    """The training of one rank, which ends in a phase if it is one of those that do."""

    def __init__(self, job: Lossy, rank: int, folder: Path) -> None:
        self.job, self.rank, self.folder, self.step, self.count = job, rank, folder, 0, 0
        self.fault = next((loss for loss in job.losses if loss.rank == rank), None)

    def at(self, phase: str) -> None:
        """End this rank, if it is to end here."""
        fault = self.fault
        if fault is None or (fault.phase, fault.step) != (phase, self.step):
            return
        self.fault = None
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind == "_exit":
            os._exit(3)
        if fault.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            raise ValueError("the data are wrong")

    def before(self, owner: type, name: str, phase: str, *, after: bool = False) -> None:
        """Let a method of a class be a place of a phase."""
        method: Callable[..., Any] = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not after:
                self.at(phase)
            result = method(*args, **kwargs)
            if after:
                self.at(phase)
            return result

        setattr(owner, name, wrapped)

    def compiled(self) -> Any:
        torch.manual_seed(0)
        job, model = self.job, Net()
        mesh = DeviceMesh("cpu", torch.arange(2 * job.copies).view(-1, 2), mesh_dim_names=("dp", "pp"))
        cut = {"layers.2": 2 if job.schedule == "zbv" else 1}
        pipe = pc.compile(model, 4 if job.schedule == "zbv" else 2, mesh=mesh, example_args=(data(0, 0)[0],), n_microbatches=COUNT,
                          schedule=job.schedule, loss_fn=mse_loss, cost="analytic", lost_copies="continue", pin=cut,
                          batch_norm=job.batch_norm)  # fmt: skip
        for layer in model.layers:
            layer.register_forward_hook(lambda *_: self._forward())
        self.before(GradientReduction, "finish", "reduction")
        self.before(CallOutcome, "_await_others", "before the outcome")
        self.before(CallOutcome, "_await_others", "at the outcome", after=True)
        return pipe

    def _forward(self) -> None:
        self.count += 1
        if self.count > COUNT // 2:  # a later micro-batch
            self.at("forward")

    def run(self) -> None:
        pipe, number = self.compiled(), self.rank // 2
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        for self.step in range(STEPS):
            self.at("loader")
            (x, y), self.count = data(self.step, number), 0
            loss = pipe.step(x, target=y)
            self.note(self.step, loss.item(), pipe.copies.left)
            if self.step % 2:  # every second step is added to the gradients of the one before
                self.at("clip")
                pipe.clip_grad_norm_(0.5)
                self.at("optimizer")
                optimizer.step()
                optimizer.zero_grad()
            elif self.fault is not None and self.fault.phase in ("clip", "optimizer"):
                self.at(self.fault.phase)
            self.at("evaluate")
            pipe.evaluate([(x, y)])
            self.at("save")
        dist.barrier(group=pipe.copies.group)
        pc.save_checkpoint({"model": pipe.state_dict()}, self.folder / "out", STEPS)
        torch.save(pipe.full_state_dict(), self.folder / f"{self.rank}.pt")

    def note(self, *values: Any) -> None:
        with (self.folder / f"{self.rank}.jsonl").open("a") as out:
            out.write(json.dumps(values) + "\n")


def _rank(job: Lossy, rank: int, line: Connection, folder: Path) -> None:
    os.dup2(os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT), 2)
    store = dist.TCPStore("127.0.0.1", line.recv(), is_master=False, timeout=timedelta(seconds=60))
    limit = timedelta(seconds=job.timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2 * job.copies, timeout=limit)
    said = "ended well"
    try:
        Training(job, rank, folder).run()
        dist.destroy_process_group()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        sys.excepthook(type(error), error, error.__traceback__)
    (folder / f"{rank}.said").write_text(said)
    os._exit(0)


# -- in one process ---------------------------------------------------------------------------------------------------


def reference(job: Lossy, lefts: Sequence[tuple[int, ...]]) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Return the losses of a loop over the samples of the copies that are left in each step, and the state of each copy."""
    torch.manual_seed(0)
    models = [Net() for _ in range(job.copies)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    losses = []
    for step, left in enumerate(lefts):
        losses.append(_step([models[number] for number in left], step, left, deferred=job.batch_norm == "deferred"))
        for number in left if step % 2 else ():
            nn.utils.clip_grad_norm_(models[number].parameters(), 0.5)
            optimizers[number].step()
            optimizers[number].zero_grad()
    return losses, [model.state_dict() for model in models]


def _step(models: Sequence[Net], step: int, left: Sequence[int], *, deferred: bool) -> float:
    """Run a step of all copies one after the other, and add the mean of their gradients to the earlier ones of each."""
    total, earlier = 0.0, [[parameter.grad for parameter in model.parameters()] for model in models]
    statistics, seen = copy.deepcopy(models[0].norm), list[torch.Tensor]()
    for model, number in zip(models, left, strict=True):
        model.zero_grad()
        hook = model.norm.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))
        x, y = data(step, number)
        for part, target in zip(x.chunk(COUNT), y.chunk(COUNT), strict=True):
            loss = mse_loss(model(part), target) / COUNT
            loss.backward()
            total += loss.item() / len(left)
        hook.remove()
    if deferred:  # statistics of the whole batch, once
        with torch.no_grad():
            statistics(torch.cat(seen))
        for model in models:
            model.norm.load_state_dict(model.norm.state_dict() | dict(statistics.named_buffers()))
    sums = [sum(p.grad / len(left) for p in same) for same in zip(*(m.parameters() for m in models), strict=True)]
    for model, before in zip(models, earlier, strict=True):
        for parameter, gradient, old in zip(model.parameters(), sums, before, strict=True):
            parameter.grad = gradient.clone() if old is None else old + gradient
    return total


# -- a trial ----------------------------------------------------------------------------------------------------------


def tried(job: Lossy, folder: Path, patience: float = 120.0) -> list[str]:
    """Run a training. Return what is wrong."""
    lines = [FORK.Pipe(duplex=False) for _ in range(2 * job.copies)]
    ranks = [FORK.Process(target=_rank, args=(job, rank, line, folder)) for rank, (line, _) in enumerate(lines)]
    for process in ranks:
        process.start()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    for _, line in lines:
        line.send(store.port)
    stopped = {loss.rank for loss in job.losses if loss.kind == "stop"}
    _await([process for rank, process in enumerate(ranks) if rank not in stopped], patience)
    for rank in stopped:
        os.kill(ranks[rank].pid or 0, signal.SIGCONT)
    _await(ranks, 30.0)
    for process in ranks:
        process.kill()
        process.join()
    with FORK.Pool(1) as child:  # this process must not run autograd
        return child.apply(_wrong, (job, folder))


def _await(ranks: Sequence[Any], patience: float) -> None:
    end = time.monotonic() + patience
    while any(process.is_alive() for process in ranks) and time.monotonic() < end:
        time.sleep(0.05)


def _wrong(job: Lossy, folder: Path) -> list[str]:
    torch.set_num_threads(1)
    lefts = _lefts(job, folder)
    losses, states = reference(job, lefts)
    wrong = [
        f"step {step} is of copies {left}"
        for step, left in enumerate(lefts)
        if left not in (job.left(step), *([job.left(step - 1)] if job.is_open else []))
    ]
    for rank in range(2 * job.copies):
        file = folder / f"{rank}.said"
        said = file.read_text() if file.exists() else "nothing"
        own = next((loss.kind for loss in job.losses if loss.rank == rank), "")
        wrong += [f"rank {rank} {fault}" for fault in _faults(job, folder, rank, own, said, lefts, losses, states)]
    return wrong


def _lefts(job: Lossy, folder: Path) -> list[tuple[int, ...]]:
    """Return the copies of each step, as the first rank that goes on to the end has noted them."""
    first = 2 * min(job.left(STEPS), default=0)
    return [tuple(left) for _, _, left in _rows(folder, first)]


def _rows(folder: Path, rank: int) -> list[Any]:
    file = folder / f"{rank}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _faults(
    job: Lossy,
    folder: Path,
    rank: int,
    own: str,
    said: str,
    lefts: Sequence[tuple[int, ...]],
    losses: Sequence[float],
    states: Sequence[Any],
) -> list[str]:
    """Return what is wrong with what one rank said and computed."""
    if own in ("kill", "_exit"):
        return [f"said {said:.300}"] * (said != "nothing")
    if rank // 2 not in job.left(STEPS) or job.ends:
        lost = [loss.rank for loss in job.losses if loss.rank // 2 == rank // 2]
        expected = "ValueError: the data are wrong" if own == "raise" else f"rank {lost[-1]} failed"
        return [f"said {said:.300}"] * (expected not in said)
    if said != "ended well":
        return [f"said {said:.600}"]
    rows = _rows(folder, rank)
    faults = [f"ran steps {[row[0] for row in rows]}"] * ([row[0] for row in rows] != list(range(STEPS)))
    for step, loss, left in rows:
        if tuple(left) != lefts[step]:
            faults.append(f"has copies {left} in step {step}, and another rank {lefts[step]}")
        if abs(loss - losses[step]) > 1e-6:
            faults.append(f"has loss {loss} in step {step}, not {losses[step]}")
    state = torch.load(folder / f"{rank}.pt")
    apart = {key: (value.double() - states[rank // 2][key].double()).abs().max().item() for key, value in state.items()}
    bound = 1e-6 if job.batch_norm == "each" else 1e-5
    return faults + [f"has {key} off by {off:.1e}" for key, off in apart.items() if not off <= bound]


def main() -> None:
    torch.set_num_threads(1)
    warm()
    names = sys.argv[2:]

    def wrong(name: str) -> list[str]:
        folder = Path(sys.argv[1]) / str(names.index(name))
        folder.mkdir()
        found = tried((TRIALS | FULL)[name], folder)
        print(name, found, file=sys.stderr, flush=True)
        return found

    waits = [name for name in names if "stop" in name]
    others = [name for name in names if name not in waits]
    print(json.dumps(in_lanes(wrong, others[::2], others[1::2], waits)))


if __name__ == "__main__":
    main()
