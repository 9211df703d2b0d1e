"""Mistakes in scripts for ranks: what each rank says if one of them is asked for something else than the others.

python tests/distributed/mistakes.py FOLDER prints, as JSON, a list per mistake: per rank its error, or its result.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Timer
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import pipecompile as pc
from pipecompile.distributed.rank_backend import RankBackend
from tests.distributed.faults import FORK, warm
from tests.distributed.lanes import in_lanes

TIMEOUT, PATIENCE = 20.0, 60.0


def square(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y - target).square().mean()


def compiled(count: int = 2, **options: Any) -> Any:
    """Return a pipeline of two stages."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    return pc.compile(model, 2, loss_fn=square, n_microbatches=count, cost="analytic", **options)


def batches(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(number, 8, 4), torch.randn(number, 8, 4)


def alone(rank: int, call: Callable[[Any], Any]) -> Any:
    """Make a call on rank 1 alone, between steps of both."""
    pipe, (x, y) = compiled(), batches(1)
    pipe.step(x[0], target=y[0])
    if rank == 1:
        call(pipe)
    return [pipe.step(x[0], target=y[0]).item() for _ in range(2)]


def another_size(rank: int) -> Any:
    pipe, (x, y), size = compiled(), batches(1), 8 - 4 * rank
    return pipe.step(x[0, :size], target=y[0, :size]).item()


def world_sampler(rank: int) -> Any:
    pipe, (x, y) = compiled(), batches(2)
    return pipe.step(x[rank], target=y[rank]).item()


class Scaled(nn.Module):
    """Two layers on two ranks, which both multiply by a number in a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> Any:
        return self.second(torch.tanh(self.first(x * scale))) * scale


def other_samples(rank: int) -> Any:
    """Step with other samples on each rank, in forms of batches of which only types were compared; return the errors."""
    pipe, (x, y) = compiled(), batches(2)
    torch.manual_seed(0)
    scaled = pc.compile(Scaled(), 2, pin={"first": 0, "second": 1}, n_microbatches=2, loss_fn=square, cost="analytic")
    ones, number, parts = torch.ones(8, 4), torch.tensor(2.0), [*zip(x[rank].split(4), y[rank].split(4), strict=True)]
    lists: dict[str, Any] = {"generator": (part for part in parts)}
    lists["list"] = [pc.Microbatch(part, target=target) for part, target in parts]
    said = {name: error_of(lambda given=given: pipe.step(microbatches=given)) for name, given in lists.items()}
    count = error_of(lambda: pipe.step(microbatches=iter(parts[rank:])))
    said["number"] = error_of(lambda: scaled.step(x[0], number + rank, target=y[0]))
    said["zeros"] = error_of(lambda: scaled.step(x[0], ones * (1 - rank), target=y[0]))
    zeros = torch.zeros(8, 4)
    went_on = scaled.step(zeros if rank else x[0], number, target=y[0] if rank else zeros).item()
    return json.dumps([count, said, went_on == scaled.step(x[0], number, target=y[0]).item()])


def first_inference(rank: int) -> Any:
    """Call a pipeline for the first time, with samples of each rank's own, a placeholder, and a dict in another order."""
    x, _ = batches(2)
    pipe, parts = compiled(), {"x": x[0], "scale": x[1]}
    named = pc.compile(Scaled(), 2, pin={"first": 0, "second": 1}, n_microbatches=2, cost="analytic")
    with torch.no_grad():
        own = error_of(lambda: pipe(x[rank]))
        again = error_of(lambda: pipe(x[rank]))
        order = error_of(lambda: named(**dict(sorted(parts.items(), reverse=rank == 1))))
        given = pipe(x[0] if rank == 0 else torch.zeros_like(x[0]))
    return json.dumps([own, again, order, given.sum().item()])


def skipped(rank: int) -> Any:
    pipe, (x, y) = compiled(), batches(4)
    return [pipe.step(x[i], target=y[i]).item() for i in range(4) if (rank, i) != (1, 1)]


def autocast(rank: int) -> Any:
    pipe, (x, y) = compiled(), batches(1)
    pipe.step(x[0], target=y[0])
    with torch.autocast("cpu", torch.bfloat16, enabled=rank == 1):
        return pipe.step(x[0], target=y[0]).item()


def scaled(rank: int) -> Any:
    pipe, (x, y) = compiled(), batches(1)
    pipe.step(x[0], target=y[0])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=rank == 1)
    return pipe.step(x[0], target=y[0], scaler=scaler).item()


def another_layer(rank: int) -> Any:
    """Compile a model with another activation on rank 1."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh() if rank else nn.ReLU(), nn.Linear(4, 4))
    pipe, (x, y) = pc.compile(model, 2, n_microbatches=2, loss_fn=square, cost="analytic"), batches(1)
    return pipe.step(x[0], target=y[0]).item()


def alarmed(rank: int) -> Any:
    """Let a signal handler of rank 1 raise while it waits for rank 0, which sleeps."""
    pipe, (x, y) = compiled(), batches(1)
    pipe.step(x[0], target=y[0])
    if rank == 0:
        time.sleep(3)
    else:
        signal.signal(signal.SIGALRM, _raise)
        signal.alarm(1)
    return pipe.step(x[0], target=y[0]).item()


def _raise(*_: Any) -> None:
    raise RuntimeError("the job is about to be preempted")


def without_gradients(rank: int) -> Any:
    pipe, (x, y) = compiled(), batches(1)
    pipe.step(x[0], target=y[0])
    with torch.set_grad_enabled(rank == 0):
        return pipe.step(x[0], target=y[0]).item()


def called(pipe: Any) -> None:
    with torch.no_grad():
        pipe(batches(1)[0][0])


def uncaught(rank: int) -> Any:
    pipe, (x, y) = compiled(), batches(1)
    pipe.step(x[0], target=y[0])
    if rank == 1:
        raise ValueError("bad record 7")
    return pipe.step(x[0], target=y[0]).item()


def killed(rank: int) -> Any:
    """Kill the rank that measures and solves, in the midst of it."""
    pipe, (x, y) = compiled(), batches(1)
    if rank == 0:
        RankBackend.share_plan = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,return-value]
    return pipe.step(x[0], target=y[0]).item()


def ended(call: Callable[[Any], Any], *, steps: int) -> Callable[[int], Any]:
    """Return a mistake: rank 1 ends without an error after so many steps, and rank 0 goes on with a call."""

    def run(rank: int) -> Any:
        pipe, (x, y) = compiled(), batches(1)
        for _ in range(steps):
            pipe.step(x[0], target=y[0])
        if rank == 1:
            sys.exit()
        return call(pipe)

    return run


def stepped(pipe: Any) -> Any:
    x, y = batches(1)
    return pipe.step(x[0], target=y[0]).item()


def saved(pipe: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return pc.save_checkpoint({"model": pipe.state_dict()}, folder, 1).result()


def forked(rank: int) -> Any:
    """Call the pipeline in a child of rank 1, and end the child; then step on both ranks. Return what the child said."""
    pipe, (x, y) = compiled(), batches(1)
    pipe.step(x[0], target=y[0])
    said = ""
    if rank == 1:
        reading, writing = os.pipe()
        if not (child := os.fork()):
            os.write(writing, "; ".join([error_of(lambda: stepped(pipe)), error_of(lambda: evaluated(pipe))]).encode())
            os._exit(0)
        os.waitpid(child, 0)
        said = os.read(reading, 1 << 16).decode()
    return said, stepped(pipe)


def evaluated(pipe: Any) -> Any:
    x, y = batches(1)
    return pipe.evaluate([(x[0], y[0])])


def error_of(call: Callable[[], Any]) -> str:
    try:
        return f"no error: {call()}"
    except pc.PipecompileError as error:
        return f"{type(error).__name__}: {error}"


def with_workers(_: int) -> Any:
    """Load samples in workers that inherit the pipeline."""
    pipe, (x, y) = compiled(), batches(1)
    pipe.step(x[0], target=y[0])
    samples = [*zip(x[0], y[0], strict=True)]
    loader = torch.utils.data.DataLoader(samples, 4, num_workers=1, multiprocessing_context="fork")  # type: ignore[arg-type]
    return [pipe.step(x, target=y).item() for x, y in loader]


def killed_with_child(rank: int) -> Any:
    """Kill a rank whose child has its connections, too."""
    pipe, (x, y) = compiled(), batches(1)
    pipe.step(x[0], target=y[0])
    if rank == 1:
        if not os.fork():
            time.sleep(PATIENCE / 4)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    return stepped(pipe)


def interrupted(rank: int) -> Any:
    """Press Ctrl-C on rank 0 while it waits for rank 1, which sleeps."""
    pipe, (x, y) = compiled(), batches(1)
    pipe.step(x[0], target=y[0])
    if rank == 1:
        time.sleep(6)
    else:
        Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    return stepped(pipe)


MISTAKES: dict[str, Callable[[int], Any]] = {
    "batch of another size": another_size,
    "sampler over all ranks": world_sampler,
    "skipped step": skipped,
    "first inference": first_inference,
    "other samples": other_samples,
    "eval": lambda rank: alone(rank, lambda pipe: pipe.eval()),
    "autocast": autocast,
    "no_grad": without_gradients,
    "scaler": scaled,
    "another layer": another_layer,
    "alarm": alarmed,
    "call": lambda rank: alone(rank, called),
    "gathered": lambda rank: alone(rank, lambda pipe: pipe.gathered()),
    "clip_grad_norm_": lambda rank: alone(rank, lambda pipe: pipe.clip_grad_norm_(1.0)),
    "uncaught exception": uncaught,
    "killed in compile": killed,
    "ended before compile": ended(stepped, steps=0),
    "ended before a step": ended(stepped, steps=1),
    "ended before saving": ended(saved, steps=1),
    "forked child": forked,
    "workers of a loader": with_workers,
    "killed with a child": killed_with_child,
    "interrupted": interrupted,
    "full_state_dict": lambda rank: alone(rank, lambda pipe: pipe.full_state_dict()),
}

SLEEPING = ("alarm", "interrupted"), ("killed with a child",)
"""Lanes of mistakes in which a process sleeps."""


def of(
    name: str,
    folder: Path,
    world: int = 2,
    script: Callable[[int], Any] | None = None,
    timeout: float = TIMEOUT,
) -> list[str]:
    """Return what each rank says after a mistake, by default that of the name."""
    lines = [FORK.Pipe(duplex=False) for _ in range(world)]
    given = name, folder, script or MISTAKES[name], timeout
    ranks = [FORK.Process(target=_rank, args=(rank, world, lines[rank][0], *given)) for rank in range(world)]
    for process in ranks:
        process.start()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    for _, line in lines:
        line.send(store.port)
    end = time.monotonic() + PATIENCE
    for process in ranks:
        process.join(max(0.0, end - time.monotonic()))
        process.kill()
    files = [folder / f"{name}.{rank}" for rank in range(world)]
    return [file.read_text() if file.exists() else "no end" for file in files]


def _rank(
    rank: int, world: int, line: Connection, name: str, folder: Path, script: Callable[[int], Any], timeout: float
) -> None:
    os.dup2(os.open(folder / f"{name}.{rank}.log", os.O_WRONLY | os.O_CREAT), 2)
    store = dist.TCPStore("127.0.0.1", line.recv(), is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout))
    start = time.monotonic()
    try:
        said = f"result: {script(rank)}"
    except pc.PipecompileError as error:
        said = f"{type(error).__name__}: {error}"
    except (ValueError, RuntimeError, KeyboardInterrupt) as error:
        sys.excepthook(type(error), error, error.__traceback__)  # a child of multiprocessing does not
        said = str(error) or type(error).__name__
    (folder / f"{name}.{rank}").write_text(f"{said}\n{time.monotonic() - start:.1f}")
    dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    warm()
    names = [name for name in MISTAKES if not any(name in lane for lane in SLEEPING)]
    print(json.dumps(in_lanes(lambda name: of(name, Path(sys.argv[1])), names, *SLEEPING)))


if __name__ == "__main__":
    main()
