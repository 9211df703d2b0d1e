"""The integer program's skeleton: ordered stages as monotone step variables.

    below(v, s) = 1  iff  stage(v) <= s          stage(v) = 2 of 5:   s      0  1  2  3  4
                                                                      below  0  0  1  1  1
    below(v, s) <= below(v, s + 1)        inside(v, s) = below(v, s) - below(v, s - 1)
    below(a, s) >= below(b, s)            for every pair with stage(a) <= stage(b)
    below(a, s) >= below(b, s + 1)        for every pair with stage(a) < stage(b)

Windows fix the steps outside them, so most are numbers. Branching on one step moves a cluster and all that hangs on it to
one side. Steps are made when they are first asked for: a program of one stage has those of two boundaries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from pipecompile.partitioners.ilp.solver_backend import Linear, Mip

__all__ = ["Steps"]

ZERO, ONE = Linear(0.0), Linear(1.0)


class Steps:
    """The step variables of a program. What it returns is shared: add it to something, never something to it."""

    def __init__(self, mip: Mip, first: Sequence[int], last: Sequence[int]) -> None:
        self.mip, self.first, self.last = mip, first, last
        self._below: dict[tuple[int, int], Linear] = {}
        self._inside: dict[tuple[int, int], Linear] = {}

    def below(self, cluster: int, stage: int) -> Linear:
        """1 when the cluster is in this stage or before."""
        if stage < self.first[cluster]:
            return ZERO
        if stage >= self.last[cluster]:
            return ONE
        if (cluster, stage) not in self._below:
            self._below[cluster, stage] = self.mip.variable(integer=True)
        return self._below[cluster, stage]

    def inside(self, cluster: int, stage: int) -> Linear:
        """1 when the cluster is in this stage."""
        if not self.first[cluster] <= stage <= self.last[cluster]:
            return ZERO
        if (cluster, stage) not in self._inside:
            self._inside[cluster, stage] = self.below(cluster, stage) - self.below(cluster, stage - 1)
        return self._inside[cluster, stage]

    def may_be(self, cluster: int, stage: int) -> bool:
        return bool(self.first[cluster] <= stage <= self.last[cluster])

    def rise(self, clusters: Iterable[int], boundaries: range) -> None:
        """Steps never fall, between the given boundaries (boundary s is between the stages s and s + 1)."""
        for v in clusters:
            for s in range(max(self.first[v], boundaries.start), min(self.last[v] - 1, boundaries.stop - 1)):
                self.mip.require(self.below(v, s + 1), self.below(v, s))

    def order(self, arcs: Iterable[tuple[int, int]], apart: Iterable[tuple[int, int]], boundaries: range) -> None:
        """stage(a) <= stage(b) for every arc, stage(a) < stage(b) for every pair apart, as seen at the boundaries."""
        for a, b in arcs:
            for s in range(max(self.first[b], boundaries.start), min(self.last[a], boundaries.stop)):
                self.mip.require(self.below(a, s), self.below(b, s))
        for a, b in apart:
            for s in range(max(self.first[b] - 1, boundaries.start), min(self.last[a], boundaries.stop - 1)):
                self.mip.require(self.below(a, s), self.below(b, s + 1))

    def stages(self, values: NDArray[np.float64]) -> list[int]:
        """The stage of every cluster in a solution. A step that was never asked for is free."""
        stages = []
        for v, (first, last) in enumerate(zip(self.first, self.last, strict=True)):
            steps = ((s, self._below.get((v, s))) for s in range(first, last))
            stages.append(next((s for s, step in steps if step is not None and step.value(values) > 0.5), int(last)))
        return stages
