"""The state of the solver: the incumbent (best cut so far), the proven lower bound, the deadline, and progress reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from time import monotonic

from pipecompile.partitioners.clusters import Clusters
from pipecompile.partitioners.constraints import StageRanges, stage_ranges
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import bottleneck

__all__ = ["GAP", "GOOD", "Progress", "ProgressCallback", "SolverState"]

GAP = 1e-6
"""Relative distance of bottleneck and lower bound at which a partition counts as optimal."""

GOOD = 0.001
"""Default relative distance at which the search ends. A profile of the costs is less exact."""

REPORT_INTERVAL = 0.1
"""Seconds between two calls of the progress callback without a new incumbent, bound or phase."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a search, as reported to the user. `incumbent` and `bound` are in seconds; `incumbent` is infinite until a
    cut is found. `phase` is one of

        orders          dynamic programs along linear orders (dp/chain_partition.py, dp/counted_copies.py)
        moves           local search (local_search.py), annealing (bottleneck_annealing.py)
        down-sets       dynamic programs over all down-sets (dp/down_sets.py, dp/alike_stages.py)
        windows         stage windows of a target bottleneck (bounds/stage_windows.py)
        filling         stages filled one after another (dp/stage_filling.py, ilp/greedy_fill.py)
        columns         bound from covers by stages (ilp/column_bound.py)
        program         integer program (ilp/formulation.py)
        neighbourhood   large neighbourhood search (ilp/large_neighbourhood.py)
    """

    phase: str
    incumbent: float
    bound: float
    seconds: float

    @property
    def gap(self) -> float:
        """The most by which the bottleneck can still fall, as a fraction of the incumbent."""
        return 1.0 - self.bound / self.incumbent if 0 < self.incumbent < inf else float(self.incumbent > 0)


ProgressCallback = Callable[[Progress], None]


class SolverState:
    """The state of one solve. `assignment` has the stage of every cluster of the incumbent, and `bottleneck` its bottleneck.
    No cut has a bottleneck below `lower_bound`. `method` produced the incumbent or the bound last. Times are in seconds.
    `tolerance` is the relative distance of the two at which the search ends.
    """

    def __init__(
        self, clusters: Clusters, machine: Machine, begin: float, seconds: float, callback: ProgressCallback | None
    ) -> None:
        self.clusters, self.machine, self.begin, self.deadline = clusters, machine, begin, begin + seconds
        self.ranges: StageRanges | None = stage_ranges(clusters, len(machine)) if clusters.is_constrained else None
        self.assignment: list[int] | None = None
        self.bottleneck, self.lower_bound, self.phase, self.method = inf, 0.0, "orders", "dp"
        self.tolerance = GAP
        self._callback, self._last_report = callback, -inf

    @property
    def has_gap(self) -> bool:
        """Whether the lower bound is still below the incumbent by more than the tolerance."""
        return self.assignment is None or self.bottleneck - self.lower_bound > self.tolerance * self.bottleneck

    @property
    def target(self) -> float:
        """The bottleneck that a better cut must stay below."""
        return self.bottleneck * (1 - self.tolerance / 2)

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - monotonic()

    def offer(self, assignment: Sequence[int], clusters: Clusters | None = None, method: str = "") -> bool:
        """Make a cut the incumbent if it is better, and return whether it is. `clusters` may be merged from the state's."""
        projected = self.clusters.project(clusters or self.clusters, assignment)
        value = bottleneck(self.clusters, self.machine, projected)
        if value >= self.bottleneck:
            return False
        self.assignment, self.bottleneck, self.method = projected, value, method or self.method
        self.report(force=True)
        return True

    def raise_bound(self, bound: float, method: str = "") -> None:
        """Record the proof that no cut has a bottleneck below `bound`."""
        if bound > self.lower_bound:
            self.lower_bound, self.method = min(bound, self.bottleneck), method or self.method
            self.report(force=True)

    def enter(self, phase: str) -> None:
        """Begin a phase of the search, for progress reports."""
        self.phase = phase
        self.report(force=True)

    def report(self, incumbent: float = inf, bound: float = 0.0, *, force: bool = False) -> None:
        """Call the progress callback, at most every `REPORT_INTERVAL` seconds unless `force`.

        `incumbent` and `bound` are those of a solver that still runs.
        """
        now = monotonic()
        if self._callback is not None and (force or now > self._last_report + REPORT_INTERVAL):
            self._last_report = now
            value = min(self.bottleneck, incumbent)
            self._callback(Progress(self.phase, value, max(self.lower_bound, min(bound, value)), now - self.begin))
