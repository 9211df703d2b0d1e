"""The measured spans of a step of all ranks on one clock, that of the first rank of the pipeline.

    first   t0 ──ping──►           t1        the other rank read its clock, t, between t0 and t1: that clock is ahead by
    other            ──► t ──pong──►         t - (t0 + t1) / 2, with an error of at most (t1 - t0) / 2

The exchange with the least error counts (Cristian, "Probabilistic clock synchronization", 1989). All times are in seconds.
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
"""Exchanges with each rank. More of them find a shorter one: 20 give about 0.1 ms between idle processes of one machine."""


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Seconds by which the clock of a rank is ahead of that of the first rank, and the largest error of that number."""

    ahead: float = 0.0
    error: float = 0.0


def read_clocks(communicator: Communicator, clock: Callable[[], float] = perf_counter) -> tuple[ClockOffset, ...]:
    """Return, on the first rank, the offsets of all ranks; on the others nothing. All ranks must call this together."""
    if communicator.ranks.index != 0:
        communicator.expect(0, ["ping"] * _EXCHANGES)
        for _ in range(_EXCHANGES):
            communicator.receive(0, "ping")
            communicator.send(0, "pong", torch.tensor(clock(), dtype=torch.float64, device="cpu"))
        communicator.flush()
        return ()
    others = (_read_clock(communicator, peer, clock) for peer in range(1, communicator.ranks.size))
    return (ClockOffset(), *others)


def _read_clock(communicator: Communicator, peer: int, clock: Callable[[], float]) -> ClockOffset:
    communicator.expect(peer, ["pong"] * _EXCHANGES)
    offsets = []
    for _ in range(_EXCHANGES):
        start = clock()
        communicator.send(peer, "ping", None)
        remote = float(communicator.receive(peer, "pong"))
        end = clock()
        offsets.append(ClockOffset(remote - (start + end) / 2, (end - start) / 2))
    return min(offsets, key=lambda offset: offset.error)


def gathered_spans(communicator: Communicator, spans: Spans) -> tuple[Spans, float]:
    """Return, on every rank, the spans of all ranks and the largest error of their times. All ranks must call this together."""
    communicator.connect()
    offsets = read_clocks(communicator)
    own = [span for span in spans if span[0] == communicator.ranks.index]
    if communicator.ranks.index != 0:
        communicator.send(0, "spans", own, once=True)
        communicator.flush()
        result: tuple[Spans, float] = communicator.receive(0, "all spans", once=True)
        return result
    merged = list(own)
    for peer, offset in enumerate(offsets[1:], start=1):
        remote: Spans = communicator.receive(peer, "spans", once=True)
        merged += [(device, name, start - offset.ahead, end - offset.ahead) for device, name, start, end in remote]
    result = merged, max(offset.error for offset in offsets)
    for peer in range(1, communicator.ranks.size):
        communicator.send(peer, "all spans", result, once=True)
    communicator.flush()
    return result
