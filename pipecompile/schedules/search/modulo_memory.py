"""Memory of a modulo schedule in its steady state: what several micro-batches hold at once, over one period.

    stage 0, period 2    F0 ──────── I0            held for 5 seconds: at least 2 micro-batches at any time,
                            F1 ──────── I1         and 3 for half of it

O(n log n) for n actions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pipecompile.ir import Kind
from pipecompile.schedules.search.modulo_schedule import ModuloSchedule
from pipecompile.schedules.search.workload import Workload

__all__ = ["memory_excess"]

_TICKS = 10**9
"""Ticks of a period: one action may start where another ends, in spite of rounding."""

_TOLERANCE = 1e-9
"""Share of the capacity that counts as nothing."""

_Times = Mapping[tuple[Kind, int], float]
"""Seconds of an action of a stage on micro-batch 0."""

_Lifetime = tuple[int, float, float, float]
"""Device, begin and end in seconds, and bytes."""


def memory_excess(placed: ModuloSchedule, workload: Workload, capacity: Sequence[float]) -> float:
    """Return how far the devices exceed their capacity, as the sum of the shares of it; 0 if all that stages save, and the values
    that move between them, fit.
    """
    held = [0.0] * workload.n_devices
    changes: list[list[tuple[int, float]]] = [[] for _ in held]
    start = {(kind, s): begin for kind, s, begin, _ in placed.actions}
    end = {(kind, s): until for kind, s, _, until in placed.actions}
    for device, begin, until, size in (*_saved(start, end, workload), *_values(start, end, workload)):
        first, last = round(begin / placed.period * _TICKS), round(until / placed.period * _TICKS)
        held[device] += ((last - first) // _TICKS + (last % _TICKS < first % _TICKS)) * size
        changes[device] += (first % _TICKS, size), (last % _TICKS, -size)
    return sum(map(_excess, held, changes, capacity))


def _excess(held: float, changes: list[tuple[int, float]], capacity: float) -> float:
    """Return by what share of the capacity the most of a device exceeds it."""
    most = held
    for _, size in sorted(changes):
        held += size
        most = max(most, held)
    over = most - capacity
    return over / max(capacity, 1e-300) if over > _TOLERANCE * max(capacity, 1e-300) else 0.0


def _saved(start: _Times, end: _Times, workload: Workload) -> Iterator[_Lifetime]:
    """Yield what stages hold of a micro-batch: from F or R to I or B, from I to W, and from F to R."""
    kind = Kind.INPUT_GRAD if workload.split else Kind.BACKWARD
    for s, device in enumerate(workload.placement):
        begin, until = start[Kind.FORWARD, s], end[kind, s]
        if workload.is_recomputed[s]:
            yield device, begin, end[Kind.RECOMPUTE, s], workload.recipe[s]
            begin = start[Kind.RECOMPUTE, s]
        yield device, begin, until, workload.saved[s]
        if workload.split:
            yield device, until, end[Kind.WEIGHT_GRAD, s], workload.weight_saved[s]


def _values(start: _Times, end: _Times, workload: Workload) -> Iterator[_Lifetime]:
    """Yield the values of a micro-batch at both ends of each transfer, which begins when the value is written."""
    backward = Kind.INPUT_GRAD if workload.split else Kind.BACKWARD
    for kind, sent in ((Kind.FORWARD, workload.forward_transfers), (backward, workload.gradient_transfers)):
        for s, device in enumerate(workload.placement):
            leaves, needed = end[kind, s], dict[str, tuple[float, float]]()
            for transfer in sent[s]:
                until = max(_last_read(kind, reader, end, workload) for reader in transfer.stages)
                if transfer.device != device:
                    yield transfer.device, leaves, until, transfer.nbytes
                    until = leaves + transfer.seconds
                needed[transfer.value] = transfer.nbytes, max(until, needed.get(transfer.value, (0.0, leaves))[1])
            for nbytes, until in needed.values():
                yield device, start[kind, s], until, nbytes


def _last_read(kind: Kind, reader: int, end: _Times, workload: Workload) -> float:
    """Return the end of the last action that reads a value: R reads the inputs of F again."""
    is_read_again = kind is Kind.FORWARD and workload.is_recomputed[reader]
    return end[Kind.RECOMPUTE if is_read_again else kind, reader]
