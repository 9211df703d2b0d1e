"""Cut a linear order below a target where a sender pays for every receiver: exact, unlike `chain_partition.py`.

    u ──▶ c1 ── c2 ── c3        how often the stage of u sends depends on the boundaries between c1 and c3,
      │  1  │  2  │  3          so the stages are chosen from the last to the first

A *suffix* is a choice of the stages s to the last, which begin at position i. Of all that it did, only the number of its stages that
receive each tensor produced before i matters. So a suffix is dropped if another of the same stage and position receives no tensor
more often, if one of its stages exceeds the target, or if the stages before cannot end at i: their least bottleneck, with every
tensor paid for once, is a bound. Where consumers come in runs, as in a dense block, few suffixes are left of each position:
O(K n w F) for n positions, w starts per end and F tensors with several consumers.

The order in which suffixes are extended is that of dynamic programming with labels: Desrochers and Soumis, "A generalized
permanent labelling algorithm for the shortest path problem with time windows", 1988.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from pipecompile.partitioners.clusters import Clusters
from pipecompile.partitioners.constraints import StageRanges
from pipecompile.partitioners.dp.chain_partition import Floats, OrderProgram
from pipecompile.partitioners.machine import Machine

__all__ = ["counts_copies", "cut_order_below"]

Ints = NDArray[np.int64]

MAX_SUFFIXES = 5_000_000
"""Suffixes that are looked at for one target: a second or two."""


def counts_copies(clusters: Clusters, machine: Machine, order: Sequence[int]) -> bool:
    """Return whether the cut of an order depends on the number of receivers, and `cut_order_below` can count them: each stage is a
    device, links are alike, and tensors with several consumers flow forwards.
    """
    position = {cluster: p for p, cluster in enumerate(order)}
    several = [flow for flow in clusters.flows if len(flow.consumers) > 1 and flow.time]
    forwards = all(position[flow.source] < min(position[c] for c in flow.consumers) for flow in several)
    return bool(several) and forwards and machine.is_one_to_one and machine.links is None and not machine.multicast


def cut_order_below(
    clusters: Clusters,
    machine: Machine,
    order: Sequence[int],
    ranges: StageRanges | None,
    target: float,
    deadline: float,
) -> tuple[list[int] | None, bool]:
    """Return a cut of the order with a bottleneck of at most the target, or None, and whether None proves that there is none: not
    so after the deadline or `MAX_SUFFIXES`. Requires `counts_copies`.
    """
    program = OrderProgram.of(clusters, machine, order, ranges, target)
    if program is None:
        return None, True
    search = _SuffixSearch(clusters, order, program, target, len(machine))
    first = search.run(deadline)
    return (None if first is None else _assignment(first, order)), search.is_complete


@dataclass(frozen=True, slots=True)
class _Suffix:
    """Stages from a position to the end. `copies` has, per tensor with several consumers and produced before `start`, the number of
    these stages that receive it. `rest` is the suffix without its first stage, which ends where `rest` starts.
    """

    stage: int
    start: int
    copies: Ints
    rest: _Suffix | None


class _SuffixSearch:
    def __init__(
        self, clusters: Clusters, order: Sequence[int], program: OrderProgram, target: float, n_stages: int
    ) -> None:
        position = {cluster: p for p, cluster in enumerate(order)}
        flows = [flow for flow in clusters.flows if len(flow.consumers) > 1 and flow.time]
        self.program, self.target, self.n_stages, self.n = program, target, n_stages, len(order)
        self.time = np.array([flow.time for flow in flows])
        self.source = np.array([position[flow.source] for flow in flows])
        is_consumer = np.zeros((len(flows), self.n + 1), dtype=np.int64)  # [flow, p + 1]: position p consumes it
        for row, flow in enumerate(flows):
            is_consumer[row, [position[c] + 1 for c in flow.consumers]] = 1
        self.consumers_before = is_consumer.cumsum(axis=1)
        self.seen, self.is_complete = 0, True

    def run(self, deadline: float) -> _Suffix | None:
        """Return a suffix that is the whole order, with all loads at most the target; None if none is found."""
        empty = _Suffix(self.n_stages, self.n, np.zeros(len(self.time), dtype=np.int64), None)
        kept: dict[int, list[_Suffix]] = {self.n: [empty]}
        for s in reversed(range(self.n_stages)):
            longer: dict[int, list[_Suffix]] = {}
            for suffixes in kept.values():
                for suffix in suffixes:
                    self._extend(suffix, s, longer)
                if self.seen > MAX_SUFFIXES or monotonic() > deadline:
                    self.is_complete = False
                    return None
            kept = longer
        return kept[0][0] if 0 in kept else None

    def _extend(self, rest: _Suffix, s: int, longer: dict[int, list[_Suffix]]) -> None:
        """Put every stage s before a suffix that ends where it starts, an empty one included."""
        j = rest.start
        if j and not self.program.may_end(s, j):
            return
        if self.program.best[s, j] <= self.target:
            _keep(longer.setdefault(j, []), _Suffix(s, j, rest.copies, rest))
        if not j:
            return
        low = int(self.program.low[j])
        loads = self.program.loads(s, j, self._extra_sent(rest, j)[low:])
        fitting = low + np.flatnonzero((loads <= self.target) & (self.program.best[s, low:j] <= self.target))
        self.seen += 1 + len(fitting)
        received = self.consumers_before[:, j, None] > self.consumers_before[:, fitting]
        copies = np.where(self.source[:, None] < fitting, rest.copies[:, None] + received, 0)
        for column, i in enumerate(fitting.tolist()):
            _keep(longer.setdefault(i, []), _Suffix(s, i, copies[:, column], rest))

    def _extra_sent(self, rest: _Suffix, j: int) -> Floats:
        """Return, per start i, the seconds for the second and further receivers of the tensors that [i, j) produces."""
        extra = np.maximum(rest.copies - 1, 0) * self.time
        at = np.bincount(self.source, weights=extra, minlength=self.n)[:j]
        summed: Floats = at[::-1].cumsum()[::-1]
        return summed


def _keep(suffixes: list[_Suffix], new: _Suffix) -> None:
    """Add a suffix unless another one receives no tensor more often; drop those for which that is now so."""
    if any((old.copies <= new.copies).all() for old in suffixes):
        return
    suffixes[:] = [old for old in suffixes if not (new.copies <= old.copies).all()]
    suffixes.append(new)


def _assignment(first: _Suffix, order: Sequence[int]) -> list[int]:
    """Return the stage of every cluster."""
    assignment, suffix = [0] * len(order), first
    while suffix.rest is not None:
        for p in range(suffix.start, suffix.rest.start):
            assignment[order[p]] = suffix.stage
        suffix = suffix.rest
    return assignment
