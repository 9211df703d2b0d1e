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

from pipecompile.distributed.communicator import Line
from pipecompile.runtime.registers import Spans

__all__ = ["Clock", "gathered_spans", "read_clocks"]

_EXCHANGES = 20


@dataclass(frozen=True, slots=True)
class Clock:
    """By how many seconds a rank's clock is ahead of the first one's, and how exact that is."""

    ahead: float = 0.0
    error: float = 0.0


def read_clocks(line: Line, clock: Callable[[], float] = perf_counter) -> tuple[Clock, ...]:
    """Of every rank of the pipeline, by its first one; the others, which must call this too, know only that it was done."""
    if line.ranks.index != 0:
        line.expect(0, ["ping"] * _EXCHANGES)
        for _ in range(_EXCHANGES):
            line.take(0, "ping")
            line.send(0, "pong", torch.tensor(clock(), dtype=torch.float64))
        line.flush()
        return ()
    others = (_read_clock(line, peer, clock) for peer in range(1, line.ranks.size))
    return (Clock(), *others)


def _read_clock(line: Line, peer: int, clock: Callable[[], float]) -> Clock:
    line.expect(peer, ["pong"] * _EXCHANGES)
    found = []
    for _ in range(_EXCHANGES):
        start = clock()
        line.send(peer, "ping", None)
        there = float(line.take(peer, "pong"))
        end = clock()
        found.append(Clock(there - (start + end) / 2, (end - start) / 2))
    return min(found, key=lambda each: each.error)


def gathered_spans(line: Line, spans: Spans) -> tuple[Spans, float]:
    """What all ranks measured, on every rank, and by how much their clocks may be wrong. Each must call this."""
    line.connect()
    clocks = read_clocks(line)
    spans = [span for span in spans if span[0] == line.ranks.index]
    if line.ranks.index != 0:
        line.send(0, "spans", spans, once=True)
        line.flush()
        whole: tuple[Spans, float] = line.take(0, "all spans", once=True)
        return whole
    found = list(spans)
    for peer, clock in enumerate(clocks[1:], start=1):
        theirs: Spans = line.take(peer, "spans", once=True)
        found += [(device, name, start - clock.ahead, end - clock.ahead) for device, name, start, end in theirs]
    whole = found, max(clock.error for clock in clocks)
    for peer in range(1, line.ranks.size):
        line.send(peer, "all spans", whole, once=True)
    line.flush()
    return whole
