"""Release lags: how many micro-batches later a forward has to wait for a backward, because memory allows no more in flight.

    device   F0 F1 F2 │ I0 │ F3           capacity for 3: F of micro-batch 3 waits for I of micro-batch 0, a lag of 3

Every stage runs its micro-batches in ascending order, so n + 1 of them are in flight when F of micro-batch m + n starts before I of
micro-batch m has ended. Stages of one device nest: while stage t, a later one, runs a micro-batch, the earlier stage s of the device
still holds it. So these must fit:
  (n + 1) saved[s] + saved[t]      or F of m + n on s waits for I of m on t
  (n + 1) (saved[s] + saved[t])    or F of m + n on t waits for I of m on t
  (n + 1) saved[s] + saved[t]      or F of m + n on t waits for I of m on s

What I leaves for W holds the forward up further: if it fits beside the others only after more I, the forward waits for these or for W,
at least the seconds of the shorter of both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from pipecompile.ir import Kind
from pipecompile.schedules.search.cell_seconds import CellSeconds, least_return, least_seconds
from pipecompile.schedules.search.workload import Transfers, Workload, value_bytes, with_tolerance

__all__ = ["Lag", "release_lags"]

_Sets = Sequence[set[int]]


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
    reached = _reached(workload.forward_transfers), _reached(workload.gradient_transfers)
    lags = [lag for device in range(workload.n_devices) for lag in _lags(workload, device, capacity[device], reached)]
    return [lag for lag in lags if lag.count < n_microbatches]


def _lags(workload: Workload, device: int, capacity: float, reached: tuple[_Sets, _Sets]) -> Iterator[Lag]:
    """Yield the lags of a device. `reached`: per stage, the stages that forwards and that backwards lead to."""
    if capacity == inf:
        return
    nested = _NestedStages.on(workload, device, *reached)
    values = value_bytes(workload)
    for s in nested.own:
        size = nested.held(s)
        room = with_tolerance(max(0.0, capacity - values[s]))
        for lag in _lag(s, s, Kind.INPUT_GRAD, room, size):
            yield replace(lag, seconds=_until_released(nested, lag, room))
        for t in nested.inner(s):
            beside = nested.held(t) - size
            least = max(0.0, capacity - beside - min(values[s], values[t]))
            for lag in _lag(s, t, Kind.INPUT_GRAD, with_tolerance(least), size):
                yield replace(lag, seconds=_until_returned(nested, lag, room))
        for o in nested.outer(s):
            beside = size - nested.held(o)
            for lag in _lag(s, o, Kind.INPUT_GRAD, max(0.0, room - beside), nested.held(o)):
                yield replace(lag, seconds=_until_outer_released(nested, lag, room))
        if workload.split and (least := _left(nested, s)):
            yield from _lag(s, s, Kind.WEIGHT_GRAD, max(0.0, room - size + least), least)


@dataclass(frozen=True, slots=True)
class _NestedStages:
    """The stages of a device, `own`, and per stage the least bytes of a micro-batch from F to I, `kept`. `encloses` has the pairs (s, t)
    of which s holds a micro-batch at least as long as t: F of s leads to F of t, and I of t to I of s.
    """

    workload: Workload
    cell: CellSeconds
    own: tuple[int, ...]
    kept: tuple[float, ...]
    encloses: frozenset[tuple[int, int]]

    @classmethod
    def on(cls, workload: Workload, device: int, down: _Sets, up: _Sets) -> _NestedStages:
        own = tuple(s for s in range(workload.n_stages) if workload.placement[s] == device)
        encloses = frozenset((s, t) for s in own for t in own if t in down[s] and s in up[t])
        kept = tuple(_kept(workload, s) for s in range(workload.n_stages))
        return cls(workload, least_seconds(workload), own, kept, encloses)

    def inner(self, s: int) -> list[int]:
        return [t for t in self.own if (s, t) in self.encloses]

    def outer(self, t: int) -> list[int]:
        return [s for s in self.own if (s, t) in self.encloses]

    def held(self, s: int) -> float:
        """Return the bytes of a micro-batch that stage s runs: what it and the stages around it keep."""
        return self.kept[s] + sum(self.kept[u] for u in self.outer(s))

    def returned(self, t: int) -> float:
        """Return the least seconds from the end of I on stage t until I on another stage has ended that encloses it, or until W of t."""
        returns = [least_return(self.workload, self.cell, t, u) for u in self.outer(t)]
        return min([self.cell.weight_grad[t], *returns])


def _until_released(nested: _NestedStages, lag: Lag, room: float) -> float:
    """Return the least seconds between I and the forward of a lag of one stage: until W, until I of an outer stage, or until so many more
    I that these may wait.
    """
    s = lag.forward
    if not nested.workload.split:
        return 0.0
    held, left = nested.held(s), nested.held(s) - nested.kept[s] + _left(nested, s)
    released = ceil((held * (lag.count + 1) - room) / (held - left) - 1e-9) if held > left else inf
    until_w = nested.returned(s)
    return until_w if released > lag.count else min(until_w, max(0, released - 1) * nested.cell.input_grad[s])


def _until_returned(nested: _NestedStages, lag: Lag, room: float) -> float:
    """Return the least seconds between I of a later stage and the forward of a lag: until W of that stage, or I of an earlier one."""
    s, t = lag.forward, lag.release
    beside = nested.held(t) - nested.kept[t] - nested.held(s)
    if not nested.workload.split or nested.held(s) * (lag.count + 1) + beside + _left(nested, t) <= room:
        return 0.0
    return nested.returned(t)


def _until_outer_released(nested: _NestedStages, lag: Lag, room: float) -> float:
    """Return the least seconds between I of an outer stage and the forward of a lag: until W of that stage, I of a stage around it, or
    its I of the next micro-batch.
    """
    s, o = lag.forward, lag.release
    left = nested.held(o) - nested.kept[o] + _left(nested, o)
    beside = nested.held(s) - nested.held(o)
    if not nested.workload.split or nested.held(o) * lag.count + beside + left <= room:
        return 0.0
    following = nested.cell.input_grad[o] if lag.count > 1 else inf
    return min(nested.returned(o), following)


def _left(nested: _NestedStages, s: int) -> float:
    """Return the least that stage s holds of a micro-batch from I to W."""
    return min(nested.kept[s], nested.workload.weight_saved[s])


def _kept(workload: Workload, s: int) -> float:
    """Return the least that stage s holds of a micro-batch from F to I."""
    return min(workload.saved[s], workload.recipe[s]) if workload.is_recomputed[s] else workload.saved[s]


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
