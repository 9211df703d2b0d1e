"""The questions: what a rank does, and what it says of it. Faults come before the third step of the last rank."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import SAMPLES, batch, compared, eager_gradients

Make = Callable[..., Any]


def rank() -> int:
    return int(os.environ["RANK"])


def is_last() -> bool:
    return rank() == int(os.environ["WORLD_SIZE"]) - 1


def short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}{'...' if len(text) > 400 else ''}"


def once(make: Make, kind: str, samples: int = SAMPLES, *, ignored: bool = False, **settings: bool) -> str:
    """Return how the gradients of one step compare with eager."""
    peer, (x, y) = make(kind, **settings), batch(samples, ignored=ignored)
    for _ in range(
        2 if "copies" in settings else 1
    ):  # in the first step torchft's copies copy the weights of the first
        peer.step(x, y)
    return compared(peer.gradients(), eager_gradients(kind, x, y))


def fault(make: Make, happens: Callable[[], None], **settings: bool) -> str:
    """Return what a rank meets in its third step, and after how many seconds, when `happens` met the last one before."""
    peer = make("plain", **settings)
    for seed in (1, 2):
        peer.step(*batch(seed=seed))
    time.sleep(1)
    if is_last():
        happens()
    start = time.monotonic()
    try:
        peer.step(*batch(seed=3))
    except BaseException as error:
        return f"after {time.monotonic() - start:.1f} s: {short(error)}"
    note = getattr(peer, "note", "")
    return f"after {time.monotonic() - start:.1f} s: the step ended without an error{'; ' + note if note else ''}"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stand_still() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def loader_fails() -> None:
    raise ValueError("bad sample 17")


def leave() -> None:
    raise SystemExit(0)


def unlike(make: Make, mine: tuple[torch.Tensor, torch.Tensor]) -> str:
    """Return how the gradients compare with eager, when the last rank has another batch than the others."""
    x, y = batch()
    peer = make("plain")
    peer.step(*(mine if is_last() else (x, y)))
    return compared(peer.gradients(), eager_gradients("plain", x, y))


def flipped(make: Make) -> str:
    """Return what loading makes of the second of two checkpoints, of which one bit of a weight is another."""
    peer, folder = make("plain"), Path(os.environ["FOLDER"])
    for step in (1, 2):
        peer.step(*batch(seed=step))
        peer.save(folder, step)
    before = peer.weights()
    torch.distributed.barrier()
    if rank() == 0:
        flip(folder, next(iter(before.values())))
    torch.distributed.barrier()
    loaded = peer.load(folder)
    same = all(torch.equal(value, before[name]) for name, value in peer.weights().items())
    return f"loaded {loaded}, weights {'as they were' if same else 'other than they were, without an error'}"


def flip(folder: Path, weight: torch.Tensor) -> None:
    """Change one bit of this weight in the file of the second checkpoint that has it."""
    sought = weight.contiguous().numpy().tobytes()[:64]
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and "1" not in path.parent.name):
        if (place := (data := bytearray(path.read_bytes())).find(sought)) >= 0:
            data[place + 10] ^= 0x10
            path.write_bytes(data)
            return
    raise LookupError("no file has the weight")


def into_eager(make: Make) -> str:
    """Return whether a checkpoint of two ranks loads into the plain model in one process."""
    peer, folder = make("plain"), Path(os.environ["FOLDER"])
    for step in (1, 2):
        peer.save(folder, step)
    torch.distributed.barrier()
    if not hasattr(peer, "into_eager"):
        return "not tried"
    if rank() == 0:
        peer.into_eager(folder)
    return "loaded"


def shown(make: Make) -> str:
    """Return the order of a step, where the peer shows it before it runs."""
    peer = make("plain")
    return peer.shown() if hasattr(peer, "shown") else "no call for it was found"


QUESTIONS: dict[str, tuple[int, Callable[[Make], str]]] = {
    "chain of layers": (2, lambda make: once(make, "plain")),
    "skip over stages": (2, lambda make: once(make, "skip")),
    "skip, looped schedule": (2, lambda make: once(make, "skip", looped=True)),
    "looped schedule": (2, lambda make: once(make, "plain", looped=True)),
    "tied weights": (2, lambda make: once(make, "tied")),
    "uneven last batch (10 samples, 4 micro-batches)": (2, lambda make: once(make, "plain", 10)),
    "labels that do not count": (2, lambda make: once(make, "plain", ignored=True)),
    "killed rank": (2, lambda make: fault(make, die)),
    "stopped rank": (2, lambda make: fault(make, stand_still)),
    "rank whose loader raises": (2, lambda make: fault(make, loader_fails)),
    "rank that leaves": (2, lambda make: fault(make, leave)),
    "other labels on one rank": (2, lambda make: unlike(make, (batch()[0], batch(seed=9)[1]))),
    "other words on one rank": (2, lambda make: unlike(make, (batch(seed=9)[0], batch()[1]))),
    "another batch on one rank": (2, lambda make: unlike(make, batch(seed=9))),
    "other size of the batch on one rank": (2, lambda make: unlike(make, batch(12))),
    "flipped bit in a checkpoint": (2, flipped),
    "checkpoint into the plain model": (2, into_eager),
    "copies": (2, lambda make: once(make, "plain", copies=True)),
    "copy that is killed": (2, lambda make: fault(make, die, copies=True)),
    "sharded copies x pipeline": (4, lambda make: once(make, "plain", sharded=True)),
    "order shown": (2, shown),
}
"""How many ranks each takes, and what they do."""
