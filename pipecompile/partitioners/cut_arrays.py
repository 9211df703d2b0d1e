"""A graph of clusters as arrays, for the estimates of thousands of cuts: seconds of every stage, and transfers between stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipecompile.partitioners.clusters import Clusters
from pipecompile.partitioners.machine import Machine

__all__ = ["CutArrays", "Edge", "Floats"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

Edge = tuple[tuple[int, int], float]
"""((stage, later stage that depends on it), seconds of the transfers between them, both ways)."""


@dataclass(frozen=True, slots=True)
class CutArrays:
    """Arcs are `tails` and `heads`. A flow has `seconds` and a `source`; `receivers` are (flow, consumer) pairs. `sinks` have no arcs.

    `factors[a, b]` is the factor on the seconds of a transfer from stage a to b, 0 on one device; `speed` that of every stage.
    """

    tails: Ints
    heads: Ints
    seconds: Floats
    source: Ints
    receivers: tuple[Ints, Ints]
    sinks: Ints
    factors: Floats
    speed: Floats

    @classmethod
    def of(cls, clusters: Clusters, machine: Machine, placement: Sequence[int]) -> CutArrays:
        """Return the arrays of a graph on a machine, with a device for every stage."""
        pairs = [(number, consumer) for number, flow in enumerate(clusters.flows) for consumer in flow.consumers]
        sources = {a for a, _ in clusters.arcs}
        factors = [[machine.link_factor(p, q) if p != q else 0.0 for q in placement] for p in placement]
        return cls(
            tails=_ints([a for a, _ in clusters.arcs]),
            heads=_ints([b for _, b in clusters.arcs]),
            seconds=np.array([flow.time for flow in clusters.flows], dtype=np.float64),
            source=_ints([flow.source for flow in clusters.flows]),
            receivers=(_ints([number for number, _ in pairs]), _ints([consumer for _, consumer in pairs])),
            sinks=_ints([v for v in range(len(clusters)) if v not in sources]),
            factors=np.array(factors, dtype=np.float64),
            speed=np.array([machine.speed[device] for device in placement], dtype=np.float64),
        )

    def stage_seconds(self, column: Floats, assignment: Sequence[int] | Ints) -> list[float]:
        """Return the sum of a column over the clusters of every stage, at the speed of its device."""
        sums = np.bincount(np.asarray(assignment), weights=column, minlength=len(self.speed))
        return (sums / self.speed).tolist()  # type: ignore[no-any-return]

    def edges(self, assignment: Sequence[int] | Ints) -> list[Edge]:
        """Return the pairs of stages that depend on each other, ascending. Outputs go to the last stage, which has the loss."""
        stages, n = np.asarray(assignment), len(self.speed)
        joined = np.zeros((n, n), dtype=np.bool_)
        joined[stages[self.tails], stages[self.heads]] = True
        joined[stages[self.sinks], n - 1] = True
        arrives = np.zeros((len(self.seconds), n), dtype=np.bool_)
        arrives[self.receivers[0], stages[self.receivers[1]]] = True
        flows, targets = np.nonzero(arrives)
        begins = stages[self.source[flows]]
        later = targets > begins
        flows, targets, begins = flows[later], targets[later], begins[later]
        joined[begins, targets] = True
        np.fill_diagonal(joined, val=False)
        sums = np.bincount(begins * n + targets, weights=self.seconds[flows], minlength=n * n)
        delays = sums.reshape(n, n) * self.factors
        a, b = np.nonzero(joined)
        return list(zip(zip(a.tolist(), b.tolist(), strict=True), delays[a, b].tolist(), strict=True))


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)
