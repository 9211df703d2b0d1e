"""What is known while a problem is being solved: the best cut, the proven bound, the time that is left, and who listens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from time import monotonic

from pipecompile.partitioners.clusters import Clusters
from pipecompile.partitioners.constraints import Span, span_of
from pipecompile.partitioners.machine import Stages
from pipecompile.partitioners.objective import bottleneck

__all__ = ["GAP", "Listener", "Progress", "Search"]

GAP = 1e-6
"""Relative distance of bottleneck and bound at which a partition counts as optimal."""

PAUSE = 0.1
"""Seconds between two calls of a listener, unless something new is to be said."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the search is: "orders", "moves", "lattice", "windows", "filling", "program" or "neighbourhood"; the incumbent is
    infinite until a cut is found.
    """

    phase: str
    incumbent: float
    bound: float
    seconds: float

    @property
    def gap(self) -> float:
        """By how much the bottleneck may still fall, as a fraction of it."""
        return 1.0 - self.bound / self.incumbent if 0 < self.incumbent < inf else float(self.incumbent > 0)


Listener = Callable[[Progress], None]


class Search:
    """The state of one search. `stage` is the best cut of `clusters`, `value` its bottleneck, `bound` below every cut's."""

    def __init__(
        self, clusters: Clusters, stages: Stages, begin: float, seconds: float, listener: Listener | None
    ) -> None:
        self.clusters, self.stages, self.begin, self.deadline = clusters, stages, begin, begin + seconds
        self.span: Span | None = span_of(clusters, len(stages))
        self.stage: list[int] | None = None
        self.value, self.bound, self.phase, self.method = inf, 0.0, "orders", "dp"
        self._listener, self._told = listener, -inf

    @property
    def open(self) -> bool:
        """Whether bound and cut are still apart."""
        return self.stage is None or self.value - self.bound > GAP * self.value

    @property
    def target(self) -> float:
        """What a better cut stays below."""
        return self.value * (1 - GAP / 2)

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - monotonic()

    def offer(self, stage: Sequence[int], clusters: Clusters | None = None, method: str = "") -> bool:
        """Take a cut, of clusters that were merged from these, if it is better. Whether it was."""
        adopted = self.clusters.adopted(clusters or self.clusters, stage)
        value = bottleneck(self.clusters, self.stages, adopted)
        if value >= self.value:
            return False
        self.stage, self.value, self.method = adopted, value, method or self.method
        self.tell(anew=True)
        return True

    def prove(self, bound: float, method: str = "") -> None:
        """No cut is below the bound."""
        if bound > self.bound:
            self.bound, self.method = min(bound, self.value), method or self.method
            self.tell(anew=True)

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.tell(anew=True)

    def tell(self, incumbent: float = inf, bound: float = 0.0, *, anew: bool = False) -> None:
        """Tell the listener, now and then or when there is news, what is known or what a solver is about to know."""
        now = monotonic()
        if self._listener is not None and (anew or now > self._told + PAUSE):
            self._told = now
            value = min(self.value, incumbent)
            self._listener(Progress(self.phase, value, max(self.bound, min(bound, value)), now - self.begin))
