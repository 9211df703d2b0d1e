"""Release lags: how many micro-batches later a forward has to wait for a backward, because memory allows no more in flight.

    device   F0 F1 F2 │ I0 │ F3           capacity for 3: F of micro-batch 3 waits for I of micro-batch 0, a lag of 3

Every stage runs its micro-batches in ascending order, so n + 1 of them are in flight when F of micro-batch m + n starts before I of
micro-batch m has ended. Stages of one device nest: while stage t, a later one, runs micro-batch m, the earlier stage s of the device
still holds it. So (n + 1) saved[s] + saved[t] must fit, or F of m + n on s waits for I of m on t.

What I leaves for W holds the forward up further: if it fits beside the others only after more I, the forward waits for these or for W,
at least the seconds of the shorter of both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from pipecompile.ir import Kind
from pipecompile.schedules.search.cell_seconds import CellSeconds, least_return, least_seconds
from pipecompile.schedules.search.workload import Transfers, Workload, with_tolerance

__all__ = ["Lag", "release_lags"]


@dataclass(frozen=True, slots=True)
class Lag:
    """F of micro-batch m + `count` on stage `forward` starts at least `seconds` after the end of the action `kind` (I or W) of
    micro-batch m on stage `release`. Of the W of a stage, that of m is the one that ends after m others.
    """

    forward: int
    release: int
    kind: Kind
    count: int
    seconds: float = 0.0


def release_lags(workload: Workload, capacity: Sequence[float], n_microbatches: int) -> list[Lag]:
    """Return the lags that every schedule within `capacity` keeps, those of fewer than `n_microbatches` micro-batches."""
    lags = [lag for device in range(workload.n_devices) for lag in _lags(workload, device, capacity[device])]
    return [lag for lag in lags if lag.count < n_microbatches]


def _lags(workload: Workload, device: int, capacity: float) -> Iterator[Lag]:
    """Yield the lags of a device."""
    if capacity == inf:
        return
    own = [s for s in range(workload.n_stages) if workload.placement[s] == device]
    kept = [_kept(workload, s) for s in range(workload.n_stages)]
    values = _value_bytes(workload)
    down, up = _reached(workload.forward_transfers), _reached(workload.gradient_transfers)
    cell = least_seconds(workload)
    for s in own:
        room = with_tolerance(max(0.0, capacity - values[s]))
        for lag in _lag(s, s, Kind.INPUT_GRAD, room, kept[s]):
            yield replace(lag, seconds=_until_released(workload, cell, lag, room))
        inner = [t for t in own if t in down[s] and s in up[t]]
        for t in inner:
            beside = sum(kept[u] for u in inner if u == t or (t in down[u] and u in up[t]))
            least = max(0.0, capacity - beside - min(values[s], values[t]))
            for lag in _lag(s, t, Kind.INPUT_GRAD, with_tolerance(least), kept[s]):
                yield replace(lag, seconds=_until_returned(workload, cell, lag, room))
        if workload.split and (least := _left(workload, s)):
            yield from _lag(s, s, Kind.WEIGHT_GRAD, max(0.0, room - kept[s] + least), least)


def _until_released(workload: Workload, cell: CellSeconds, lag: Lag, room: float) -> float:
    """Return the least seconds between I and the forward of a lag of one stage: until W, or until so many more I that W may wait."""
    s = lag.forward
    kept, left = _kept(workload, s), _left(workload, s)
    if not workload.split:
        return 0.0
    released = ceil((kept * (lag.count + 1) - room) / (kept - left) - 1e-9) if kept > left else inf
    until_w = cell.weight_grad[s]
    return until_w if released > lag.count else min(until_w, max(0, released - 1) * cell.input_grad[s])


def _until_returned(workload: Workload, cell: CellSeconds, lag: Lag, room: float) -> float:
    """Return the least seconds between I of a later stage and the forward of a lag: until W of that stage, or I of the earlier one."""
    s, t = lag.forward, lag.release
    if not workload.split or _kept(workload, s) * (lag.count + 1) + _left(workload, t) <= room:
        return 0.0
    return min(cell.weight_grad[t], least_return(workload, cell, t, s))


def _left(workload: Workload, s: int) -> float:
    """Return the least that stage s holds of a micro-batch from I to W."""
    return min(_kept(workload, s), workload.weight_saved[s])


def _kept(workload: Workload, s: int) -> float:
    """Return the least that stage s holds of a micro-batch from F to I."""
    return min(workload.saved[s], workload.recipe[s]) if workload.is_recomputed[s] else workload.saved[s]


def _value_bytes(workload: Workload) -> list[float]:
    """Return, per stage, the bytes of the values that its forward writes, and of those that it received from other devices."""
    totals = [0.0] * workload.n_stages
    for s, transfers in enumerate(workload.forward_transfers):
        totals[s] += sum({transfer.value: transfer.nbytes for transfer in transfers}.values())
        for transfer in transfers:
            if transfer.device != workload.placement[s]:
                for reader in transfer.stages:
                    totals[reader] += transfer.nbytes
    return totals


def _lag(s: int, t: int, kind: Kind, capacity: float, size: float) -> Iterator[Lag]:
    """Yield the lag of F on s behind the release on t, if at most some micro-batches of `size` fit in `capacity`."""
    if size > 0 and (fitting := capacity / size) < 1e9:
        yield Lag(s, t, kind, max(1, int(fitting)))


def _reached(sent: Transfers) -> list[set[int]]:
    """Return, per stage, the stages that its transfers lead to, directly or through others."""
    reached: list[set[int]] = [set() for _ in sent]
    changed = True
    while changed:
        changed = False
        for s, transfers in enumerate(sent):
            nearest = {stage for transfer in transfers for stage in transfer.stages}
            further = nearest.union(*(reached[stage] for stage in nearest))
            changed |= not further <= reached[s]
            reached[s] |= further
    return reached
