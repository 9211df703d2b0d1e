"""Faults at random actions of random ranks: the reports of the other ranks, the end of all, and the start after it.

    1st start   step 0  step 1  step 2  2F1 ✗ killed        the others raise "rank 1 failed before the result of 2F1 arrived"
    2nd start                   step 2  step 3  step 4      from the last checkpoint that all ranks have

`Trial` forks the ranks from this process, so that they import nothing. Run as a script with FOLDER, it runs a fault of each kind. Under
torchrun: torchrun --max-restarts=1 tests/distributed/faults.py FOLDER '{"schedule": ..., "fault": ...}'.
"""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import pipecompile as pc
from pipecompile.distributed import rank_backend
from pipecompile.driver.programs import step_executable
from pipecompile.ir import HOST, Op
from pipecompile.schedules import CATALOGUE

STEPS, COUNT = 4, 4
KINDS = ("raise", "kill", "stall")
MORE_KINDS = ("exit", "_exit", "interrupt", "terminate", "stop")
"""Kinds that only the benchmark has: sys.exit, os._exit, SIGINT, SIGTERM, SIGSTOP."""


@dataclass(frozen=True)
class Fault:
    """A fault of one kind before instruction `place` of the row of a rank, in step `step`, which is not the first."""

    kind: str
    rank: int
    step: int
    place: int


@dataclass(frozen=True)
class Job:
    """A training on `world` ranks, in `copies` of a pipeline. `timeout` is that of `init_process_group`, in seconds.

    With `is_direct` values go straight from rank to rank, as between GPUs, with gloo for NCCL.
    """

    schedule: str
    world: int
    fault: Fault | None = None
    timeout: float = 8.0
    copies: int = 1
    is_direct: bool = False


class Net(nn.Module):
    """A chain of layers with a skip over all of them and a weight that the first and the last layer share."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.layers[-1].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = h = self.layers[0](x)
        for layer in self.layers[1:]:
            h = layer(h.tanh())
        return h + first


def square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def run(folder: Path, job: Job, rank: int, store: dist.Store) -> None:
    limit = timedelta(seconds=job.timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world, timeout=limit)
    train(folder, job)
    dist.destroy_process_group()


def train(folder: Path, job: Job) -> None:
    """Train on this rank, from the last checkpoint that all ranks have. The fault happens at the first start only."""
    rank = dist.get_rank()
    rank_backend.DIRECT_TYPES |= {"cpu"} if job.is_direct else set()
    torch.manual_seed(0)
    places = torch.arange(job.world).view(job.copies, -1)
    mesh = DeviceMesh("cpu", places, mesh_dim_names=("dp", "pp")) if job.copies > 1 else None
    n_stages = places.shape[1] * (CATALOGUE[job.schedule].chunks or 1)
    batches = torch.randn(STEPS, 10, 8)[:, rank // places.shape[1] :: job.copies]
    pipe = pc.compile(Net(n_stages), n_stages, example_args=(batches[0],), n_microbatches=COUNT, loss_fn=square,
                      schedule=job.schedule, cost="analytic", tied="apart", mesh=mesh)  # fmt: skip
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    start = resumed(folder, pipe, optimizer)
    for step in range(start, STEPS):
        if job.fault is not None and (job.fault.rank, job.fault.step) == (rank, step):
            arm(pipe, job, folder / "fault.json")
        loss = pipe.step(batches[step]).item()
        optimizer.step()
        optimizer.zero_grad()
        with (folder / f"{rank}.jsonl").open("a") as out:
            out.write(json.dumps([step, loss]) + "\n")
        state = {"model": pipe.state_dict(), "optimizer": optimizer.state_dict()}
        half = folder / f"{rank}.part"
        torch.save(state, half)
        half.rename(folder / f"{step}.{rank}.pt")


def resumed(folder: Path, pipe: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the last checkpoint that all ranks have; return the step that follows it."""
    rank, saved = dist.get_rank(), [-1] * dist.get_world_size()
    own = [int(path.name.partition(".")[0]) for path in folder.glob(f"*.{rank}.pt")]
    dist.all_gather_object(saved, max(own, default=-1))
    last = min(saved)
    if last >= 0:
        state = torch.load(folder / f"{last}.{rank}.pt")
        pipe.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    return last + 1


def arm(pipe: pc.Pipeline, job: Job, note: Path) -> None:
    """Put the fault before an instruction of this step, unless an earlier start had it.

    Write a note with the instruction and the actions whose results the rank has sent before it, and owes after it.
    """
    if note.exists() or job.fault is None:
        return
    executable, rows = step_executable(pipe._cache.latest, COUNT, with_target=False), pipe.program.rows
    row = rows[job.fault.rank % len(rows)]
    index, code = job.fault.place % len(row), executable.inline
    sent, owed, maker = [str(next(i.action for i in row if i.action))], [], ""
    for position, instruction in enumerate(row):
        maker = str(instruction.action or maker)
        if instruction.op is Op.SEND and instruction.peer != HOST:
            (sent if position < index else owed).append(maker)
    what = {"instruction": str(row[index].action or row[index]), "sent": sent, "owed": owed}

    def fail(frame: Any) -> None:
        note.write_text(json.dumps(what | {"time": time.time()}))
        happen(job)
        code.flat[index](frame)

    executable.__dict__["inline"] = replace(code, flat=(*code.flat[:index], fail, *code.flat[index + 1 :]))


def happen(job: Job) -> None:
    assert job.fault is not None
    match job.fault.kind:
        case "raise":
            raise ValueError("the data are wrong")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stall":
            time.sleep(job.timeout + 5)
        case "exit":
            sys.exit(3)
        case "_exit":
            os._exit(3)
        case signalled:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it starts with & ignore Ctrl-C
            os.kill(os.getpid(), SIGNALS[signalled])
            time.sleep(job.timeout)  # Python handles a signal some instructions later


SIGNALS = {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM, "stop": signal.SIGSTOP}


# -- a trial ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """The end of a start: per rank its exit code, its log, and the time of its end in seconds since the epoch."""

    codes: tuple[int | None, ...]
    logs: tuple[str, ...]
    times: tuple[float, ...]


class Trial:
    """A job whose ranks are forked from this process, which must not have run autograd itself."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job, self.folder = job, folder
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, patience: float = 120.0) -> Ended:
        """Start all ranks and wait until they end. A rank that runs after `patience` seconds is killed and has no exit code."""
        lines = [FORK.Pipe(duplex=False) for _ in range(self.job.world)]
        ranks = [FORK.Process(target=_rank, args=(rank, line, self)) for rank, (line, _) in enumerate(lines)]
        for process in ranks:
            process.start()
        # after the forks: the store has a thread, and a fork may copy a lock that the thread holds
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        for _, line in lines:
            line.send(store.port)
        times = awaited(ranks, patience)
        codes = [process.exitcode for process in ranks]
        for process in ranks:
            process.kill()
            process.join()
        logs = tuple((self.folder / f"{rank}.log").read_text() for rank in range(self.job.world))
        return Ended(tuple(codes), logs, tuple(times))

    @property
    def losses(self) -> list[dict[int, float]]:
        """The loss of every step, per rank; of a step that ran twice, the later."""
        notes = ((self.folder / f"{rank}.jsonl").read_text() for rank in range(self.job.world))
        return [dict(map(json.loads, each.splitlines())) for each in notes]

    @property
    def is_struck(self) -> bool:
        """Whether the fault has happened."""
        return (self.folder / "fault.json").exists()

    @property
    def note(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "fault.json").read_text()))


def awaited(ranks: list[Any], patience: float) -> list[float]:
    """Return when each process ended, in seconds since the epoch; 0 for one that did not. One alone that is stopped is not awaited."""
    end, times = time.monotonic() + patience, [0.0] * len(ranks)
    while not all(times) and time.monotonic() < end:
        times = [at or time.time() * (not process.is_alive()) for at, process in zip(times, ranks, strict=True)]
        running = [process.pid for at, process in zip(times, ranks, strict=True) if not at]
        if len(running) == 1 < len(ranks) and ") T " in Path(f"/proc/{running[0]}/stat").read_text():
            break
        time.sleep(0.05)
    return times


FORK = get_context("fork")
REPORT = re.compile(r"RunError: rank (\d+) failed (?:at|before the result of|before) (.+?)(?: arrived)?: (.*)")


@cache
def warm() -> None:
    """Import all modules that a compile imports, before ranks are forked. A child lists them: after autograd, a process must not fork."""
    with FORK.Pool(1) as child:
        for name in child.apply(_imported):
            with suppress(ImportError):
                import_module(name)
    gc.collect()
    gc.freeze()  # ranks look through their own objects alone, and copy no pages of these
    gc.set_threshold(10_000, 10, 10)  # as in tests/conftest.py


def _imported() -> list[str]:
    before = set(sys.modules)
    pc.compile(Net(2), 2, devices=["cpu"] * 2, example_args=(torch.zeros(4, 8),), loss_fn=square, cost="analytic")
    return [name for name in sys.modules if name not in before]


def _rank(rank: int, line: Connection, trial: Trial) -> None:
    log = os.open(trial.folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    store = dist.TCPStore("127.0.0.1", line.recv(), is_master=False, timeout=timedelta(seconds=60))
    run(trial.folder, trial.job, rank, store)


def faults_of(trial: Trial, ended: Ended) -> list[str]:
    """Return what is wrong with the end of a start; nothing if each other rank reported rank, action and reason in time."""
    job, note, wrong = trial.job, trial.note, []
    assert job.fault is not None
    limit = (job.timeout if job.fault.kind in ("stall", "stop") else 0.0) + 10.0
    possible = _reportable(job.fault.kind, note)
    for rank, (code, log, at) in enumerate(zip(ended.codes, ended.logs, ended.times, strict=True)):
        if rank == job.fault.rank and job.fault.kind == "stop":
            continue
        if not code:
            wrong.append(f"rank {rank} ended with {code}")
        if rank == job.fault.rank:
            continue
        if at - note["time"] > limit:
            wrong.append(f"rank {rank} ended {at - note['time']:.1f} s after the fault")
        report = REPORT.search(log)
        if report is None:
            wrong.append(f"rank {rank} gave no report: {log[-300:]}")
        elif int(report[1]) != job.fault.rank or report[2] not in (possible or [report[2]]):
            wrong.append(f"rank {rank} reported {report[0]}, not one of {possible}")
    return wrong


def _reportable(kind: str, note: dict[str, Any]) -> list[str]:
    """Return the actions of which a report must name one; empty if it may name any.

    A rank that raises reports the action itself. Otherwise the action is one whose result the rank still owes; what a killed
    rank sent before may have been lost with it. A rank that owes nothing may be reported with any action.
    """
    if kind in ("raise", "exit", "interrupt"):
        return [note["instruction"]]
    is_gone = kind not in ("stall", "stop")
    return [*note["owed"], *(note["sent"] if is_gone and note["owed"] else [])]


def sample(folder: Path) -> dict[str, list[str]]:
    """Return what is wrong after each kind of fault, in one pipeline and in one of two copies; "again": in the start after a kill."""
    from tests.distributed import fault_phases
    from tests.distributed.lanes import in_lanes

    jobs = {kind: Job("1f1b", 3, Fault(kind, rank, 2, 30 + 7 * rank), 5.0) for rank, kind in enumerate(KINDS)}
    jobs |= {f"{kind}, copies": Job("zbv", 4, Fault(kind, 3, 2, -2), 5.0, copies=2) for kind in KINDS}
    jobs |= {f"{kind}, direct": replace(jobs[kind], is_direct=True) for kind in KINDS}
    wrong_phases = fault_phases.sample(folder)
    trials = {name: Trial(job, folder / name) for name, job in jobs.items()}
    stalls = [name for name in jobs if "stall" in name]
    wrong = in_lanes(lambda name: faults_of(trials[name], trials[name].start()),
                     [name for name in jobs if name not in stalls], *([name] for name in stalls))  # fmt: skip
    again, plain = trials["kill"], Trial(Job("1f1b", 3), folder / "plain")
    codes = [*again.start().codes, *plain.start().codes]
    wrong |= wrong_phases
    wrong["again"] = [str(code) for code in codes if code] + ["losses"] * (again.losses != plain.losses)
    return wrong


def main() -> None:
    """Run the job given as JSON, under torchrun; without a job print the result of `sample`."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    if len(sys.argv) == 2:
        warm()
        print(json.dumps(sample(folder)))
        return
    fields = json.loads(sys.argv[2])
    job = Job(**fields | {"fault": Fault(**fields["fault"])})
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)  # see docs/rank_failures.md
    run(folder, job, int(os.environ["RANK"]), store)


if __name__ == "__main__":
    main()
