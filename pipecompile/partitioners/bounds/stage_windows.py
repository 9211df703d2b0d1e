"""Which stages a cluster can be in, if the bottleneck is to stay below a target.

    work:   |<- ancestors ->| v |<- descendants ->|        ancestors and v must fit in the stages up to that of v,
            0    1    2    [3 .. 5]    6    7              v and descendants in the stages from that of v on

The same holds for memory. Pins, pairs apart and rivals push further. Windows fix most step variables of the integer
program: on resnet50 in 6 stages 885 become 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import fsum

import numpy as np
from numpy.typing import NDArray

from pipecompile.partitioners.bounds.reachability import around, reachable
from pipecompile.partitioners.bounds.separations import LARGEST, Pairs, minimal, rivals
from pipecompile.partitioners.clusters import Clusters
from pipecompile.partitioners.machine import Stages
from pipecompile.partitioners.objective import TOLERANCE

__all__ = ["Windows", "windows"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(slots=True)
class Windows:
    """The first and the last stage of every cluster; between which bounds the work of the stages up to s lies, for every s
    but the last; and the pairs (a, b) with stage(a) < stage(b). They only ever shrink.
    """

    first: Ints
    last: Ints
    least: Floats
    most: Floats
    apart: list[tuple[int, int]]
    edges: list[tuple[int, int, int]] = field(repr=False)
    reach: Pairs | None = field(repr=False)
    before: Floats = field(repr=False)
    after: Floats = field(repr=False)
    total: float

    @property
    def empty(self) -> bool:
        """Whether some cluster has no stage left: then no cut stays below the target."""
        return bool((self.first > self.last).any())

    @property
    def n_steps(self) -> int:
        """How many step variables are open."""
        return int((self.last - self.first).sum())

    def copy(self) -> Windows:
        """The same, to shrink on its own."""
        mine = {name: getattr(self, name).copy() for name in ("first", "last", "least", "most")}
        return replace(self, **mine)

    def room(self, stage: int) -> float:
        """The least work of a stage."""
        before = self.most[stage - 1] if stage else 0.0
        return float((self.least[stage] if stage < len(self.least) else self.total) - before)

    def bound(self, boundary: int, *, least: float = 0.0, most: float = np.inf) -> None:
        """The work of the stages up to `boundary` is at least and at most so much. Everything else follows."""
        self.least[boundary] = max(self.least[boundary], least)
        self.most[boundary] = min(self.most[boundary], most)
        self.least = np.maximum.accumulate(self.least)
        self.most = np.minimum.accumulate(self.most[::-1])[::-1]
        self.shrink()

    def narrow(self, other: Windows) -> None:
        """Bound the work of stages as the windows of a target do that is not lower."""
        for boundary, (least, most) in enumerate(zip(other.least, other.most, strict=True)):
            self.bound(boundary, least=least, most=most)

    def shrink(self) -> None:
        """Make windows agree with the bounds on work, with precedence and with the pairs apart."""
        slack = self.total * TOLERANCE
        self.first = np.maximum(self.first, np.searchsorted(self.most + slack, self.before))
        missing = np.searchsorted((self.total - self.least)[::-1] + slack, self.after)
        self.last = np.minimum(self.last, len(self.least) - missing)
        first, last = self.first.tolist(), self.last.tolist()
        for a, b, gap in self.edges:  # sorted, and clusters are in topological order
            first[b] = max(first[b], first[a] + gap)
        for a, b, gap in reversed(self.edges):
            last[a] = min(last[a], last[b] - gap)
        self.first, self.last = np.array(first), np.array(last)


def windows(clusters: Clusters, stages: Stages, target: float) -> Windows:
    """The windows of all clusters. An infinite target leaves what memory and steering demand."""
    n, k = len(clusters), len(stages)
    reach = reachable(clusters) if n <= LARGEST else None
    found = None if reach is None else rivals(clusters, stages, target if np.isfinite(target) else 0.0, reach)
    apart = minimal(clusters, found) if found is not None else sorted(clusters.strict)
    moved = _moved(clusters, stages, found)
    held = np.array(clusters.bytes) + stages.least_flying * np.array(clusters.activation)
    before, after = around(clusters, np.stack([np.array(clusters.time), np.array(clusters.time) + moved, held]))
    first = np.array([max(clusters.pins.get(v, (0,))) for v in range(n)], dtype=np.int64)
    last = np.array([min(clusters.pins.get(v, (k - 1,))) for v in range(n)], dtype=np.int64)
    for row, room in ((1, [speed * target for speed in stages.speed]), (2, list(stages.limit))):
        first = np.maximum(first, np.searchsorted(_filled(stages, room), before[row]))
        last = np.minimum(last, k - 1 - np.searchsorted(_filled(stages, room, backwards=True), after[row]))
    total = fsum(clusters.time)
    edges = sorted([*((a, b, 0) for a, b in clusters.arcs), *((a, b, 1) for a, b in apart)])
    result = Windows(
        first, last, np.zeros(k - 1), np.full(k - 1, total), apart, edges, reach, before[0], after[0], total
    )
    result.shrink()
    if any(a == b for a, b in clusters.strict):
        result.last[:] = -1
    return result


def _filled(stages: Stages, room: Sequence[float], *, backwards: bool = False) -> Floats:
    """How much the stages up to each have room for, from either end. A device has room once."""
    total, seen = [0.0], set[int]()
    for device in reversed(stages.device) if backwards else stages.device:
        total.append(total[-1] + (0.0 if device in seen else room[device]))
        seen.add(device)
    return np.array(total[1:]) * (1 + TOLERANCE)


def _moved(clusters: Clusters, stages: Stages, found: Pairs | None) -> Floats:
    """Time that each cluster moves for certain: what rivals send each other. Each flow once at its source, and once at
    its consumer when there is one only. In units of work: time on a device of speed 1.
    """
    moved = np.zeros(len(clusters))
    price = 0.0 if stages.overlap else stages.cheapest * min(stages.speed)
    if found is None or not price:
        return moved
    for flow in clusters.flows:
        ends = [c for c in flow.consumers if found[flow.source, c] or found[c, flow.source]]
        if ends:
            moved[flow.source] += flow.time * price
        if ends and len(flow.consumers) == 1:
            moved[ends[0]] += flow.time * price
    return moved
