"""The least seconds of the actions of a cell (a stage and a micro-batch), and of its way through later stages and back."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from pipecompile.schedules.search.workload import Workload

__all__ = ["CellSeconds", "least_held", "least_return", "least_seconds"]


@dataclass(frozen=True, slots=True)
class CellSeconds:
    """The least seconds of the actions of one micro-batch, per stage: F, R (0 if it is not recomputed), I or the part of B until its end
    at the earliest, and W or the rest of the shorter of B and I with W.
    """

    forward: tuple[float, ...]
    recompute: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]


def least_seconds(workload: Workload) -> CellSeconds:
    """Return the least seconds of each part of a cell, whether its backward is split or not."""
    stages = range(workload.n_stages)
    recompute = tuple(workload.recompute[s] if workload.is_recomputed[s] else 0.0 for s in stages)
    if not workload.split:
        return CellSeconds(workload.forward, recompute, workload.backward, (0.0,) * workload.n_stages)
    both = [workload.input_grad[s] + workload.weight_grad[s] for s in stages]
    input_grad = tuple(map(min, workload.input_grad, workload.backward))
    rest = tuple(min(whole, b) - i for whole, b, i in zip(both, workload.backward, input_grad, strict=True))
    return CellSeconds(workload.forward, recompute, input_grad, rest)


def least_held(workload: Workload, cell: CellSeconds, s: int) -> float:
    """Return the least seconds from the start of F to the end of I of a micro-batch on stage s, on its way through later stages."""
    n_stages = workload.n_stages
    turn = [-inf] * n_stages
    start = [-inf] * n_stages
    start[s] = 0.0
    for a in range(s, n_stages):
        if start[a] > -inf:
            turn[a] = start[a] + cell.forward[a] + cell.recompute[a]
            for transfer in workload.forward_transfers[a]:
                for b in transfer.stages:
                    start[b] = max(start[b], start[a] + cell.forward[a] + transfer.seconds)
    for a in range(n_stages - 1, s, -1):
        for transfer in workload.gradient_transfers[a]:
            for b in transfer.stages:
                turn[b] = max(turn[b], turn[a] + cell.input_grad[a] + transfer.seconds)
    return turn[s] + cell.input_grad[s]


def least_return(workload: Workload, cell: CellSeconds, t: int, s: int) -> float:
    """Return the least seconds from the end of I on stage t to the end of I on an earlier stage s that waits for it."""
    ends = [-inf] * workload.n_stages
    ends[t] = 0.0
    for a in range(t, s, -1):
        for transfer in workload.gradient_transfers[a]:
            for b in transfer.stages:
                ends[b] = max(ends[b], ends[a] + transfer.seconds + cell.input_grad[b])
    return ends[s]
