"""Step variables: ordered stages as monotone 0/1 variables of the integer program.

    at_most(v, s) = 1  iff  stage(v) <= s          stage(v) = 2 of 5:   s        0  1  2  3  4
                                                                        at_most  0  0  1  1  1
    at_most(v, s) <= at_most(v, s + 1)        in_stage(v, s) = at_most(v, s) - at_most(v, s - 1)
    at_most(a, s) >= at_most(b, s)            for every pair with stage(a) <= stage(b)
    at_most(a, s) >= at_most(b, s + 1)        for every pair with stage(a) < stage(b)

Outside the window of its cluster, a step variable is a constant; most are. Branching on one step variable moves a cluster and
all its ancestors or descendants to one side. A variable is created when it is first used: a program of one stage has those
of two boundaries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from pipecompile.partitioners.ilp.solver_backend import LinearExpr, Mip

__all__ = ["StepVariables"]

ZERO, ONE = LinearExpr(0.0), LinearExpr(1.0)


class StepVariables:
    """The step variables of a program. The expressions that it returns are shared: do not modify them in place."""

    def __init__(self, mip: Mip, earliest: Sequence[int], latest: Sequence[int]) -> None:
        self.mip, self.earliest, self.latest = mip, earliest, latest
        self._at_most: dict[tuple[int, int], LinearExpr] = {}
        self._in_stage: dict[tuple[int, int], LinearExpr] = {}

    def at_most(self, cluster: int, stage: int) -> LinearExpr:
        """Return 1 iff the cluster is in this stage or before."""
        if stage < self.earliest[cluster]:
            return ZERO
        if stage >= self.latest[cluster]:
            return ONE
        if (cluster, stage) not in self._at_most:
            self._at_most[cluster, stage] = self.mip.add_variable(integer=True)
        return self._at_most[cluster, stage]

    def in_stage(self, cluster: int, stage: int) -> LinearExpr:
        """Return 1 iff the cluster is in this stage."""
        if not self.earliest[cluster] <= stage <= self.latest[cluster]:
            return ZERO
        if (cluster, stage) not in self._in_stage:
            self._in_stage[cluster, stage] = self.at_most(cluster, stage) - self.at_most(cluster, stage - 1)
        return self._in_stage[cluster, stage]

    def is_possible(self, cluster: int, stage: int) -> bool:
        """Return whether the stage lies in the window of the cluster."""
        return bool(self.earliest[cluster] <= stage <= self.latest[cluster])

    def add_monotonicity(self, clusters: Iterable[int], boundaries: range) -> None:
        """Require that steps never fall, at the given boundaries."""
        for v in clusters:
            for s in range(max(self.earliest[v], boundaries.start), min(self.latest[v] - 1, boundaries.stop - 1)):
                self.mip.add_row(self.at_most(v, s + 1), self.at_most(v, s))

    def add_precedence(
        self, arcs: Iterable[tuple[int, int]], strict_pairs: Iterable[tuple[int, int]], boundaries: range
    ) -> None:
        """Require, at the given boundaries, stage(a) <= stage(b) for every arc and stage(a) < stage(b) for strict pairs."""
        for a, b in arcs:
            for s in range(max(self.earliest[b], boundaries.start), min(self.latest[a], boundaries.stop)):
                self.mip.add_row(self.at_most(a, s), self.at_most(b, s))
        for a, b in strict_pairs:
            for s in range(max(self.earliest[b] - 1, boundaries.start), min(self.latest[a], boundaries.stop - 1)):
                self.mip.add_row(self.at_most(a, s), self.at_most(b, s + 1))

    def assignment(self, values: NDArray[np.float64]) -> list[int]:
        """Return the stage of every cluster in a solution. A step variable that no row uses is free: it counts as 0."""
        stages = []
        for v, (earliest, latest) in enumerate(zip(self.earliest, self.latest, strict=True)):
            steps = ((s, self._at_most.get((v, s))) for s in range(earliest, latest))
            is_one = (s for s, step in steps if step is not None and step.evaluate(values) > 0.5)
            stages.append(next(is_one, int(latest)))
        return stages
