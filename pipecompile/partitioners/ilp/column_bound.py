"""A lower bound from covers of all clusters by stages: column generation.

    weights of the clusters such that no stage with a load of at most T weighs more than 1
    ├── all clusters weigh more than k      there are not enough stages: no cut into k stages is below T
    └── raise T

The heaviest such weights are a linear program with a row per stage; there are too many stages for all rows. So a few are kept, and stages that
weigh more than 1 are added: those that climbs find (`stage_sets.py`), and where they find none, that of an integer program. If there is no
stage of a k-th of all weights, the target is refuted. Its relaxation of covers is stronger than those of assignments, which put a part of each
cluster into every stage, so that nothing crosses. Gilmore and Gomory, "A linear programming approach to the cutting-stock problem", 1961;
prices are smoothed as in Wentges, "Weighted Dantzig-Wolfe decomposition", 1997. The stage is that of Archer et al., "Practical Performance Guarantees
for Pipelined DNN Inference", ICML 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, inf
from random import Random
from time import monotonic

from pipecompile.partitioners.clusters import Clusters, transitive_reduction
from pipecompile.partitioners.ilp.average_stage import add_stage, stage_load
from pipecompile.partitioners.ilp.one_stage import SOLVER_TOLERANCE
from pipecompile.partitioners.ilp.solver_backend import LinearExpr, Mip
from pipecompile.partitioners.ilp.stage_sets import StageSets, mask_of, members_of
from pipecompile.partitioners.machine import Machine

__all__ = ["column_bound"]

MAX_CLUSTERS = 300
"""Clusters up to which the bound is computed: an integer program of 200 may take ten seconds."""

STEP, TRY = 0.3, 0.5
"""Position of the next target between the bound (0) and the lowest target that is not refuted (1), and the share of the seconds left
that it may take.
"""

CLOSE = 5e-4
"""Relative distance of the two at which the search ends."""

SMOOTHING = 0.6
"""Share of the best weights so far in those for which a stage is searched."""

STARTS = 50
"""Single clusters, and columns, from which climbs begin."""

FEW = 3
"""Stages that climbs must find, or else the integer program is solved."""

MIP_GAP = 0.02
"""Absolute gap of the integer program: any stage that is heavy enough will do."""

KEPT = 12
"""Columns that are kept, as a multiple of the clusters: the heaviest. The linear program of 2,000 takes a tenth of a second."""


def column_bound(
    clusters: Clusters, machine: Machine, assignment: Sequence[int], low: float, target: float, deadline: float
) -> float:
    """Return the highest target above `low`, in seconds, that is refuted by the deadline; at most `target`, and `low` if none is.

    `assignment` is a cut, whose stages are the first columns. Requires stages that are alike, without overlap of work and transfers.
    """
    is_alike = not machine.overlap and machine.min_link_factor > 0 and len(set(machine.speed)) == 1
    if not is_alike or not low or len(clusters) > MAX_CLUSTERS:
        return low
    covers, high = _Covers(clusters, machine, assignment), target
    while high - low > CLOSE * high and (now := monotonic()) < deadline:
        is_last = target - low <= 2 * CLOSE * target
        middle = target if is_last else low + STEP * (high - low)
        is_refuted = covers.refutes(middle, now + (deadline - now) * TRY)
        low, high = (middle, high) if is_refuted else (low, middle)
        if is_last:
            break
    return low


class _Covers:
    """The columns so far, as sets with their loads, and the weights that came nearest to a proof."""

    def __init__(self, clusters: Clusters, machine: Machine, assignment: Sequence[int]) -> None:
        self.clusters, self.machine, self.n_stages = clusters, machine, len(machine)
        self.sets = StageSets(clusters, machine)
        stages = [mask_of(v for v, s in enumerate(assignment) if s == stage) for stage in range(len(machine))]
        self.singles = [1 << v for v in range(len(clusters))]
        self.columns = {mask: self.sets.load(mask) for mask in [*self.singles, *stages] if mask}
        self.arcs, self.draw = transitive_reduction(clusters), Random(0)

    def refutes(self, target: float, deadline: float) -> bool:
        """Return whether no cut is below a target: False if covers by parts of stages do not show it, or not by the deadline."""
        best, share = list[float](), 0.0
        while monotonic() < deadline:
            weights = self._heaviest_weights(target, deadline)
            if weights is None or fsum(weights) <= self.n_stages * (1 + SOLVER_TOLERANCE):
                return False
            smooth = (
                [SMOOTHING * a + (1 - SMOOTHING) * b for a, b in zip(best, weights, strict=True)] if best else weights
            )
            added = self._add_by_climbs(smooth, weights, target) + self._add_by_climbs(weights, weights, target)
            if added >= FEW:
                continue
            heaviest, mask = self._heaviest_stage(smooth, target, deadline)
            if heaviest * self.n_stages < fsum(smooth):
                return True
            is_known = self.columns.get(mask or 0, inf) <= target
            if mask is None or (is_known and not best and not added):
                return False  # no time, or a known column is too heavy by rounding
            if is_known:  # it is newer than the best weights
                best = []
                continue
            self.columns[mask] = self.sets.load(mask)
            if fsum(smooth) / heaviest > share:
                best, share = smooth, fsum(smooth) / heaviest
        return False

    def _heaviest_weights(self, target: float, deadline: float) -> list[float] | None:
        """Return the weights with the largest sum under which no column below the target weighs more than 1; None if time is over."""
        program, total = Mip(), LinearExpr()
        weights = [program.add_variable() for _ in self.singles]
        for weight in weights:
            total.add(weight, -1.0)
        fitting = [mask for mask, load in self.columns.items() if load <= target]
        for mask in fitting:
            row = LinearExpr(1.0)
            for v in members_of(mask):
                row.add(weights[v], -1.0)
            program.add_row(row)
        result = program.minimise(total, deadline - monotonic())
        if result.is_interrupted:
            raise KeyboardInterrupt
        if result.values is None:
            return None
        found = [weight.evaluate(result.values) for weight in weights]
        self._drop_light(fitting, found)
        return found

    def _drop_light(self, fitting: list[int], weights: Sequence[float]) -> None:
        """Forget the lightest columns below the target if there are too many."""
        most = KEPT * len(self.singles)
        if len(fitting) > 2 * most:
            heaviest = sorted(fitting, key=lambda mask: -_weight(mask, weights))
            for mask in heaviest[most:]:
                if mask & (mask - 1):
                    del self.columns[mask]

    def _add_by_climbs(self, weights: Sequence[float], prices: Sequence[float], target: float) -> int:
        """Add stages that are heavy by `weights` and weigh more than 1 by `prices`. Return how many."""
        fitting = [mask for mask, load in self.columns.items() if load <= target]
        singles = [mask for mask in self.singles if self.columns[mask] <= target]
        starts = [mask for kind in (singles, fitting) for mask in self.draw.sample(kind, min(STARTS, len(kind)))]
        before = len(self.columns)
        for start in starts:
            mask = self.sets.climbed(start, weights, target, self.draw)
            if mask not in self.columns and _weight(mask, prices) > 1 + SOLVER_TOLERANCE:
                self.columns[mask] = self.sets.load(mask)
        return len(self.columns) - before

    def _heaviest_stage(self, weights: Sequence[float], target: float, deadline: float) -> tuple[float, int | None]:
        """Return an upper bound of the weight of a stage below the target, and a stage of at least a k-th of all weights. Without one the
        bound is 0, or infinite if the time is over.
        """
        mip, least = Mip(), fsum(weights) / self.n_stages
        inside, missing = add_stage(mip, len(self.singles), self.arcs), LinearExpr()
        for v, weight in enumerate(weights):
            missing.add(inside[v], -weight)
        mip.add_row(1.0 + SOLVER_TOLERANCE, stage_load(mip, inside, self.clusters, self.machine, target))
        mip.add_row(missing * -1.0, least * (1 - SOLVER_TOLERANCE))
        result = mip.minimise(missing, deadline - monotonic(), gap=MIP_GAP)
        if result.is_interrupted:
            raise KeyboardInterrupt
        if result.values is None:
            return (0.0 if result.is_optimal else inf), None
        return -result.bound, mask_of(v for v, here in enumerate(inside) if here.evaluate(result.values) > 0.5)


def _weight(mask: int, weights: Sequence[float]) -> float:
    return sum(weights[v] for v in members_of(mask))
