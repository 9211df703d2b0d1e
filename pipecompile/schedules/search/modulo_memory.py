"""Memory of a modulo schedule in its steady state: what several micro-batches hold at once, over one period.

    stage 0, period 2    F0 ──────── I0            held for 5 seconds: at least 2 micro-batches at any time,
                            F1 ──────── I1         and 3 for half of it

O(n log n) for n actions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipecompile.ir import Kind
from pipecompile.schedules.search.modulo_schedule import ModuloSchedule
from pipecompile.schedules.search.workload import Workload

__all__ = ["memory_excess"]

_TICKS = 10**9
"""Ticks of a period: one action may start where another ends, in spite of rounding."""

_TOLERANCE = 1e-9
"""Share of the capacity that counts as nothing."""


def memory_excess(placed: ModuloSchedule, workload: Workload, capacity: Sequence[float]) -> float:
    """Return how far the devices exceed their capacity, as the sum of the shares of it; 0 if all that stages save fits."""
    held = [0.0] * workload.n_devices
    changes: list[list[tuple[int, float]]] = [[] for _ in held]
    for s, start, end, size in _lifetimes(placed, workload):
        device = workload.placement[s]
        begin, until = round(start / placed.period * _TICKS), round(end / placed.period * _TICKS)
        first, last = begin % _TICKS, until % _TICKS
        held[device] += ((until - begin) // _TICKS + (last < first)) * size
        changes[device] += (first, size), (last, -size)
    return sum(map(_excess, held, changes, capacity))


def _excess(held: float, changes: list[tuple[int, float]], capacity: float) -> float:
    """Return by what share of the capacity the most of a device exceeds it."""
    most = held
    for _, size in sorted(changes):
        held += size
        most = max(most, held)
    over = most - capacity
    return over / max(capacity, 1e-300) if over > _TOLERANCE * max(capacity, 1e-300) else 0.0


def _lifetimes(placed: ModuloSchedule, workload: Workload) -> Iterator[tuple[int, float, float, float]]:
    """Yield (stage, start, end, bytes) of what stages hold of a micro-batch: from F or R to I or B, from I to W, and from F to R."""
    start = {(kind, s): begin for kind, s, begin, _ in placed.actions}
    end = {(kind, s): until for kind, s, _, until in placed.actions}
    kind = Kind.INPUT_GRAD if workload.split else Kind.BACKWARD
    for s in range(workload.n_stages):
        begin, until = start[Kind.FORWARD, s], end[kind, s]
        if workload.is_recomputed[s]:
            yield s, begin, end[Kind.RECOMPUTE, s], workload.recipe[s]
            begin = start[Kind.RECOMPUTE, s]
        yield s, begin, until, workload.saved[s]
        if workload.split:
            yield s, until, end[Kind.WEIGHT_GRAD, s], workload.weight_saved[s]
