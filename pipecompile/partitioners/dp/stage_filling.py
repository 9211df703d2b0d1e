"""Fill one stage after another up to a target, each as far as possible, by a dynamic program over the frontier of an order.

    │ before │ inside? ─ ─ ─ ─ frontier ─ ─ undecided ...        clusters are decided in topological order; of those decided,
                 a ─▶ c            c ─▶ e                         only the ones with an undecided neighbour matter: here c
                 b ─▶ d            d ─▶ f                         and d

A *state* is the set of frontier clusters that are inside the stage, and of tensors with a consumer inside or outside. Of each state
the program keeps the Pareto frontier of (load of the stage, reach). The *reach* of a stage is the work done after it, less the
seconds of the tensors that the other stages still receive: the more of it, the less is left to them. The load is exact where a
tensor has one more receiver, since all that precedes the stage is fixed. Real networks have narrow frontiers: 8 clusters in NASNet,
7 in Swin, so a stage takes some hundredths of a second, where an integer program (ilp/greedy_fill.py) takes seconds.

The frontier program is the one of graphs of bounded pathwidth: Bodlaender, "A partial k-arboretum of graphs with bounded
treewidth", 1998. Filling is the station-oriented scheme of assembly line balancing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from pipecompile.partitioners.clusters import Clusters, adjacency, transitive_closure
from pipecompile.partitioners.machine import Machine

__all__ = ["MAX_CLUSTERS", "StageFiller", "can_fill", "fill_below", "narrowest"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Labels = tuple[Floats, Floats, Ints]
"""Load and reach, in seconds, load ascending and reach ascending, and the record of the last cluster inside (-1: none)."""

MAX_CLUSTERS = 2000
"""Clusters up to which stages are filled: the closure has that many rows and columns."""

MAX_STATES = 4000
"""States of a frontier above which filling is given up."""

COARSENESS = 1e-5
"""Share of the target by which a label must reach further to be kept; errors add up over the clusters of a stage."""

BEFORE, INSIDE, AFTER = 0, 1, 2


def can_fill(clusters: Clusters, machine: Machine) -> bool:
    """Return whether the loads of filled stages are those of the objective: a device per stage, links alike, load a sum, memory
    without limit, and no stage prescribed.
    """
    simple = machine.is_one_to_one and machine.links is None and not machine.overlap and not any(machine.recompute)
    return simple and not machine.has_memory_limit and not clusters.is_constrained and len(clusters) <= MAX_CLUSTERS


def fill_below(
    filler: StageFiller, machine: Machine, target: float, weight: float, deadline: float = inf
) -> list[int] | None:
    """Return the stage of every cluster if stages are filled up to the target, and the last takes the rest; None if the frontier is
    too wide, or at the deadline. `weight` is that of a second of tensors, in seconds of work, when reaches are compared.
    """
    n_stages = len(machine)
    stages = range(n_stages) if filler.forwards else range(n_stages - 1, -1, -1)
    before = np.zeros(len(filler.time), dtype=bool)
    assignment = np.full(len(before), stages[-1], dtype=np.int64)
    for s in stages[:-1]:
        inside = filler.fill(before, target * machine.speed[s], weight, machine.speed[s], deadline)
        if inside is None:
            return None
        assignment[inside] = s
        before |= inside
    return [int(s) for s in assignment]


def narrowest(clusters: Clusters, orders: Iterable[Sequence[int]], *, forwards: bool) -> Sequence[int]:
    """Return the order with the narrowest frontier when read from its begin, or its end. O(orders * arcs)."""
    n = len(clusters)

    def breadth(order: Sequence[int]) -> float:
        position = np.empty(n, dtype=np.int64)
        position[list(order)] = np.arange(n) if forwards else np.arange(n)[::-1]
        last, changes = position.copy(), np.zeros(n + 1)
        for a, b in clusters.arcs:
            a, b = (a, b) if forwards else (b, a)  # noqa: PLW2901
            last[a] = max(last[a], position[b])
        np.add.at(changes, position, 1.0)
        np.add.at(changes, last, -1.0)
        return float((1.5 ** np.minimum(changes.cumsum(), 100.0)).sum())

    return min(orders, key=breadth)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor whose ends are all decided now. The bits are those of a state; `source` is used if `source_bit` is 0."""

    source_bit: int
    source: int
    consumer_bit: int
    inside_bit: int
    outside_bit: int
    has_before: bool
    has_after: bool
    time: float

    def costs(self, state: int) -> tuple[float, float]:
        """Return the seconds that the stage sends or receives it, and that later stages do."""
        inside = bool(state & (self.consumer_bit | self.inside_bit))
        after = self.has_after or bool(state & self.outside_bit) or bool(self.consumer_bit & ~state)
        source = self.source
        if self.source_bit:
            source = INSIDE if state & self.source_bit else AFTER
        if source == INSIDE:
            return self.time * (after + self.has_before), self.time * after
        remains = (inside or self.has_before) if source == AFTER else after
        return self.time * inside, self.time * remains


@dataclass(slots=True)
class _Region:
    """The clusters that one stage can hold, in order. Per cluster: the bits of those that must be inside if it is (-1: cannot be),
    (bit if inside, bit if outside) for the tensors it consumes, tensors that close with it, and the bits that are over then.
    """

    clusters: list[int]
    required: list[int]
    marks: list[list[tuple[int, int]]]
    closing: list[list[_Tensor]]
    over: list[int]


class StageFiller:
    """Fills stages of a problem in one direction."""

    def __init__(self, clusters: Clusters, order: Sequence[int], *, forwards: bool) -> None:
        predecessors, successors = adjacency(clusters)
        closure = transitive_closure(clusters)
        self.clusters, self.forwards, self.order = clusters, forwards, list(order if forwards else reversed(order))
        self.sources = predecessors if forwards else successors
        self.time = np.array(clusters.time)
        self._reach = (closure if forwards else closure.T).astype(np.float32)
        self._flows: list[list[int]] = [[] for _ in range(len(clusters))]
        for number, flow in enumerate(clusters.flows):
            for v in (flow.source, *flow.consumers) if flow.time else ():
                self._flows[v].append(number)

    def fill(
        self, before: NDArray[np.bool_], budget: float, weight: float, speed: float = 1.0, deadline: float = inf
    ) -> NDArray[np.bool_] | None:
        """Return the clusters of a stage of at most `budget` seconds that reaches furthest after those `before`; None if the frontier
        is too wide, or at the deadline.
        """
        region = self._region(before, budget)
        zero = np.zeros(1)
        states: dict[int, Labels] = {0: (zero, zero, np.full(1, -1))}
        records: list[tuple[int, Ints]] = []
        n_records = 0
        for i in range(len(region.clusters)):
            parts, chosen = self._decide(region, i, states, n_records, budget, weight * speed, speed)
            records.append((n_records, chosen))
            n_records += len(chosen)
            states = {state: _pareto(labels, COARSENESS * budget) for state, labels in parts.items()}
            if len(states) > MAX_STATES or monotonic() > deadline:
                return None
        _, reach, record = next(iter(states.values()))
        return self._inside(region, records, int(record[reach.argmax()]))

    def _decide(
        self,
        region: _Region,
        i: int,
        states: dict[int, Labels],
        n_records: int,
        budget: float,
        weight: float,
        speed: float,
    ) -> tuple[dict[int, list[Labels]], Ints]:
        """Decide cluster i of the region in every state. Return labels per new state, and the record before, per label inside."""
        parts: dict[int, list[Labels]] = {}
        chosen: list[Ints] = []
        required, bit, remaining = region.required[i], 1 << i, ~region.over[i]
        for state, (load, reach, record) in states.items():
            for inside in (False, True) if required >= 0 and state & required == required else (False,):
                marked = state | bit if inside else state
                for mark in region.marks[i]:
                    marked |= mark[not inside]
                work = self.clusters.time[region.clusters[i]] if inside else 0.0
                costs = [tensor.costs(marked) for tensor in region.closing[i]]
                more = work + sum(cost for cost, _ in costs) * speed
                fits = int(np.searchsorted(load, budget - more, side="right"))
                if not fits:
                    continue
                labels = (
                    load[:fits] + more,
                    reach[:fits] + (work - weight * sum(left for _, left in costs)),
                    record[:fits],
                )
                if inside:
                    chosen.append(labels[2])
                    labels = *labels[:2], np.arange(n_records, n_records + fits)
                    n_records += fits
                parts.setdefault(marked & remaining, []).append(labels)
        return parts, np.concatenate(chosen) if chosen else np.zeros(0, dtype=np.int64)

    def _region(self, before: NDArray[np.bool_], budget: float) -> _Region:
        work = (self.time * ~before).astype(np.float32) @ self._reach
        members = [v for v in self.order if not before[v] and work[v] <= budget * (1 + 1e-5)]
        index = {v: i for i, v in enumerate(members)}
        n, last, required = len(members), list(range(len(members))), [0] * len(members)
        for i, v in enumerate(members):
            for source in self.sources[v]:
                if source in index:
                    last[index[source]] = i
                    required[i] |= 1 << index[source]
                elif not before[source]:
                    required[i] = -1
                    break
        region = _Region(members, required, [[] for _ in members], [[] for _ in members], [0] * n)
        self._add_tensors(region, index, last, before)
        for i, end in enumerate(last):
            region.over[end] |= 1 << i
        return region

    def _add_tensors(self, region: _Region, index: dict[int, int], last: list[int], before: NDArray[np.bool_]) -> None:
        """Add the tensors of a region, and extend the last use of the clusters that their cost depends on."""
        bit = 1 << len(region.clusters)
        for number in dict.fromkeys(f for v in region.clusters for f in self._flows[v]):
            flow = self.clusters.flows[number]
            consumers, source = [index[v] for v in flow.consumers if v in index], index.get(flow.source)
            ends = consumers if source is None else [*consumers, source]
            close, marks = max(ends), (0, 0)
            for end in ends if len(consumers) == 1 else ends[len(consumers) :]:
                last[end] = max(last[end], close)
            if len(consumers) > 1:
                marks, bit = (bit, bit << 1), bit << 2
                for consumer in consumers:
                    region.marks[consumer].append(marks)
                region.over[close] |= marks[0] | marks[1]
            outside = [v for v in flow.consumers if v not in index]
            region.closing[close].append(
                _Tensor(
                    0 if source is None else 1 << source,
                    BEFORE if before[flow.source] else AFTER,
                    1 << consumers[0] if len(consumers) == 1 else 0,
                    *marks,
                    any(before[v] for v in outside),
                    not all(before[v] for v in outside),
                    flow.time,
                )
            )

    def _inside(self, region: _Region, records: list[tuple[int, Ints]], record: int) -> NDArray[np.bool_]:
        """Return the clusters inside, along the records of a label."""
        inside = np.zeros(len(self.time), dtype=bool)
        for v, (start, chosen) in zip(reversed(region.clusters), reversed(records), strict=True):
            if start <= record < start + len(chosen):
                inside[v] = True
                record = int(chosen[record - start])
        return inside


def _pareto(parts: list[Labels], least: float) -> Labels:
    """Return the labels of a state that reach further, by more than `least`, than all with no more load."""
    if len(parts) == 1:
        return parts[0]
    load, reach, record = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((-reach, load))
    load, reach, record = load[order], reach[order], record[order]
    kept = np.ones(len(load), dtype=bool)
    kept[1:] = reach[1:] > np.maximum.accumulate(reach)[:-1] + least
    return load[kept], reach[kept], record[kept]
