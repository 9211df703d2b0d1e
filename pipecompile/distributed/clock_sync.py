"""The last step of all ranks on one clock, that of the pipeline's first rank.

    first   t0 ──ping──►           t1        the other read t somewhere between t0 and t1: its clock is ahead by
    other            ──► t ──pong──►         t - (t0 + t1) / 2, to half of t1 - t0

Of many exchanges the shortest counts. On one machine the clocks are the same, and what is found is 0 within that error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch

from pipecompile.distributed.communicator import Communicator
from pipecompile.runtime.registers import Spans

__all__ = ["ClockOffset", "gathered_spans", "read_clocks"]

_EXCHANGES = 20


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """By how many seconds a rank's clock is ahead of the first one's, and how exact that is."""

    ahead: float = 0.0
    error: float = 0.0


def read_clocks(communicator: Communicator, clock: Callable[[], float] = perf_counter) -> tuple[ClockOffset, ...]:
    """Of every rank of the pipeline, by its first one; the others, which must call this too, know only that it was done."""
    if communicator.ranks.index != 0:
        communicator.expect(0, ["ping"] * _EXCHANGES)
        for _ in range(_EXCHANGES):
            communicator.take(0, "ping")
            communicator.send(0, "pong", torch.tensor(clock(), dtype=torch.float64))
        communicator.flush()
        return ()
    others = (_read_clock(communicator, peer, clock) for peer in range(1, communicator.ranks.size))
    return (ClockOffset(), *others)


def _read_clock(communicator: Communicator, peer: int, clock: Callable[[], float]) -> ClockOffset:
    communicator.expect(peer, ["pong"] * _EXCHANGES)
    found = []
    for _ in range(_EXCHANGES):
        start = clock()
        communicator.send(peer, "ping", None)
        there = float(communicator.take(peer, "pong"))
        end = clock()
        found.append(ClockOffset(there - (start + end) / 2, (end - start) / 2))
    return min(found, key=lambda each: each.error)


def gathered_spans(communicator: Communicator, spans: Spans) -> tuple[Spans, float]:
    """What all ranks measured, on every rank, and by how much their clocks may be wrong. Each must call this."""
    communicator.connect()
    clocks = read_clocks(communicator)
    spans = [span for span in spans if span[0] == communicator.ranks.index]
    if communicator.ranks.index != 0:
        communicator.send(0, "spans", spans, once=True)
        communicator.flush()
        whole: tuple[Spans, float] = communicator.take(0, "all spans", once=True)
        return whole
    found = list(spans)
    for peer, clock in enumerate(clocks[1:], start=1):
        theirs: Spans = communicator.take(peer, "spans", once=True)
        found += [(device, name, start - clock.ahead, end - clock.ahead) for device, name, start, end in theirs]
    whole = found, max(clock.error for clock in clocks)
    for peer in range(1, communicator.ranks.size):
        communicator.send(peer, "all spans", whole, once=True)
    communicator.flush()
    return whole
