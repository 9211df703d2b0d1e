"""Heads and tails: the least seconds before and after every action, if devices and links are free.

    head of 2I3   from the start of the step to the start of 2I3         F of the chain, turn, I back, and older micro-batches
    tail of 2I3   from the end of 2I3 to the end of the step             I of earlier stages, their W, and younger micro-batches

Every stage runs its micro-batches in ascending order, and a forward waits for the release of the memory that it needs
(`release_lags.py`): so heads and tails grow with the number of micro-batches in the way. One pass each, O(stages x micro-batches x
transfers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipecompile.ir import Kind
from pipecompile.schedules.search.cell_seconds import CellSeconds, least_seconds
from pipecompile.schedules.search.release_lags import Lag
from pipecompile.schedules.search.workload import Workload, senders

__all__ = ["ActionTimes", "action_times"]

Grid = list[list[float]]
"""Seconds by stage and micro-batch."""


@dataclass(frozen=True, slots=True)
class ActionTimes:
    """Heads and tails in seconds, by kind (F, I, W), stage and micro-batch. A recomputed stage runs R after the head of its F."""

    head: dict[Kind, Grid]
    tail: dict[Kind, Grid]


def action_times(workload: Workload, n_microbatches: int, lags: Sequence[Lag]) -> ActionTimes:
    """Return the heads and tails of all actions."""
    cell = least_seconds(workload)
    return ActionTimes(_heads(workload, cell, n_microbatches, lags), _tails(workload, cell, n_microbatches, lags))


def _heads(workload: Workload, cell: CellSeconds, n: int, lags: Sequence[Lag]) -> dict[Kind, Grid]:
    stages = range(workload.n_stages)
    f, i, w = ([[0.0] * n for _ in stages] for _ in range(3))
    before_f = senders(workload.forward_transfers, workload.n_stages)
    before_i = senders(workload.gradient_transfers, workload.n_stages)
    waits = _by_stage(lags, workload.n_stages, of_forward=True)
    for m in range(n):
        for s in stages:
            freed = (_freed(lag, i, w, cell, m) for lag in waits[s] if lag.count <= m)
            arrivals = (f[a][m] + cell.forward[a] + x for a, x in before_f[s])
            f[s][m] = max(0.0, *arrivals, *freed, f[s][m - 1] + cell.forward[s] if m else 0.0)
        for s in reversed(stages):
            each = cell.forward[s] + cell.recompute[s]
            own = f[s][m] + each, f[s][0] + (m + 1) * each + m * cell.input_grad[s]
            arrivals = (i[a][m] + cell.input_grad[a] + x for a, x in before_i[s])
            i[s][m] = max(*own, *arrivals, i[s][m - 1] + cell.input_grad[s] if m else 0.0)
            w[s][m] = max(i[s][m] + cell.input_grad[s], w[s][m - 1] + cell.weight_grad[s] if m else 0.0)
    return {Kind.FORWARD: f, Kind.INPUT_GRAD: i, Kind.WEIGHT_GRAD: w}


def _freed(lag: Lag, i: Grid, w: Grid, cell: CellSeconds, m: int) -> float:
    """Return the seconds until which F of micro-batch m waits for a release."""
    t, past = lag.release, m - lag.count
    if lag.kind is Kind.INPUT_GRAD:
        return i[t][past] + cell.input_grad[t] + lag.seconds
    return w[t][past] + cell.weight_grad[t]


def _tails(workload: Workload, cell: CellSeconds, n: int, lags: Sequence[Lag]) -> dict[Kind, Grid]:
    stages = range(workload.n_stages)
    f, i, w = ([[0.0] * n for _ in stages] for _ in range(3))
    waits = _by_stage(lags, workload.n_stages, of_forward=False)
    for m in reversed(range(n)):
        younger = m + 1 < n
        for s in stages:
            rest = w[s][m + 1] + cell.weight_grad[s] if younger else 0.0
            w[s][m] = max(rest, _released(waits[s], Kind.WEIGHT_GRAD, f, cell, m, n))
            rest = w[s][m] + cell.weight_grad[s]
            if younger:
                rest = max(rest, i[s][m + 1] + cell.input_grad[s])
            rest = max(rest, _released(waits[s], Kind.INPUT_GRAD, f, cell, m, n))
            for transfer in workload.gradient_transfers[s]:
                for r in transfer.stages:
                    rest = max(rest, transfer.seconds + cell.input_grad[r] + i[r][m])
            i[s][m] = rest
        for s in reversed(stages):
            rest = cell.recompute[s] + cell.input_grad[s] + i[s][m]
            if younger:
                rest = max(rest, f[s][m + 1] + cell.forward[s])
            for transfer in workload.forward_transfers[s]:
                for r in transfer.stages:
                    rest = max(rest, transfer.seconds + cell.forward[r] + f[r][m])
            f[s][m] = rest
    return {Kind.FORWARD: f, Kind.INPUT_GRAD: i, Kind.WEIGHT_GRAD: w}


def _released(lags: Sequence[Lag], kind: Kind, f: Grid, cell: CellSeconds, m: int, n: int) -> float:
    """Return the tail after the release of micro-batch m by an action of `kind`, through the forwards that wait for it."""
    waiting = (lag for lag in lags if lag.kind is kind and m + lag.count < n)
    rests = (lag.seconds + cell.forward[lag.forward] + f[lag.forward][m + lag.count] for lag in waiting)
    return max(rests, default=0.0)


def _by_stage(lags: Sequence[Lag], n_stages: int, *, of_forward: bool) -> list[list[Lag]]:
    found: list[list[Lag]] = [[] for _ in range(n_stages)]
    for lag in lags:
        found[lag.forward if of_forward else lag.release].append(lag)
    return found
