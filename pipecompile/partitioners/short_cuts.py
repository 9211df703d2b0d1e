"""The cuts of a small graph with the shortest estimated steps, by branch and bound, since moves end in local minima.

    estimate of a complete cut  >=  max over s of   before(s) + time(s) + (M - 1) * work of the device of s       of what is assigned
    and what is not assigned yet has to fit below the limit:   M * work <= limit - before(s)

Clusters are assigned in topological order, so all three terms only grow. The limit is the worst estimate among the best cuts
so far. First the limit is set closer to the bound of the empty cut: a round below a low limit ends soon, and often has the best cut.
The best cuts of series-parallel models of nine layers are up to 5 % shorter than those that moves find.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from pipecompile.partitioners.clusters import adjacency
from pipecompile.partitioners.constraints import StageRanges
from pipecompile.partitioners.step_objective import Score, StepObjective

__all__ = ["MAX_CLUSTERS", "add_short_cuts"]

MAX_CLUSTERS = 32
"""Clusters up to which cuts are searched so."""

_LIMITS = 0.2, 0.5, 1.0
"""Limits of the rounds, from the bound of the empty cut (0) to the worst of the best cuts so far (1)."""

_ROUNDING = 1 - 1e-9
"""Factor on the work that has to fit: sums in another order differ by rounding."""

Cut = tuple[int, ...]


def add_short_cuts(
    objective: StepObjective, ranges: StageRanges | None, found: dict[Cut, Score], most: int, visits: int
) -> bool:
    """Add cuts to `found` until it has the `most` shortest that use all stages. Return whether it has them for sure.

    Each of three rounds visits at most `visits` partial cuts. Large graphs are left alone.
    """
    if len(objective.clusters) > MAX_CLUSTERS:
        return False
    is_complete = False
    for share in _LIMITS:
        best = [inf] * most + [seconds for seconds, _ in found.values()]
        even = objective.microbatches * sum(objective.times) / sum(objective.machine.speed)
        limit = even + share * (min(best) - even) if share < 1.0 else sorted(best)[most - 1]
        branching = _Branching(objective, ranges, found, most, limit, visits)
        branching.extend(0)
        is_complete = branching.visits_left >= 0
    return is_complete


class _Branching:
    """Assigns the clusters depth first, and undoes each assignment."""

    def __init__(
        self, objective: StepObjective, ranges: StageRanges | None, found: dict[Cut, Score], most: int, limit: float, visits: int
    ) -> None:  # fmt: skip
        clusters, n_stages = objective.clusters, len(objective.placement)
        self.objective, self.clusters, self.found, self.most = objective, clusters, found, most
        self.limit, self.visits_left = limit, visits
        self.predecessors, _ = adjacency(clusters)
        self.earliest, self.latest = ranges or ([0] * len(clusters), [n_stages - 1] * len(clusters))
        self.n_used = min(n_stages, len(clusters))
        self.arriving = _arriving(objective)
        self.time, self.forward = objective.times, clusters.forward
        self.rest = [sum(self.time[v:]) for v in range(len(clusters) + 1)]
        self.per_work = objective.microbatches - (len(set(objective.placement)) < n_stages)
        self.stages: list[int] = []
        self.spent, self.ahead, self.held = [0.0] * n_stages, [0.0] * n_stages, [0] * n_stages
        self.delay: list[dict[int, float]] = [{} for _ in range(n_stages)]
        self.best = sorted([*[inf] * most, *(seconds for seconds, _ in found.values())])[:most]

    def extend(self, v: int) -> None:
        """Visit all cuts that begin with the present stages."""
        if v == len(self.clusters):
            self._keep(tuple(self.stages))
            return
        if self.held.count(0) - (len(self.held) - self.n_used) > len(self.clusters) - v:
            return
        for stage in range(self._first_stage(v), self.latest[v] + 1):
            self.visits_left -= 1
            if self.visits_left < 0:
                return
            before = self.spent[stage], self.ahead[stage], self.held[stage], dict(self.delay[stage])
            self._assign(v, stage)
            if self._may_be_short(v + 1):
                self.extend(v + 1)
            self.stages.pop()
            self.spent[stage], self.ahead[stage], self.held[stage], self.delay[stage] = before

    def _assign(self, v: int, stage: int) -> None:
        self.spent[stage] += self.time[v]
        self.ahead[stage] += self.forward[v]
        self.held[stage] += 1
        delay = self.delay[stage]
        for a in self.predecessors[v]:
            if self.stages[a] < stage:
                delay.setdefault(self.stages[a], 0.0)
        for source, others, seconds in self.arriving[v]:
            sender = self.stages[source]
            if sender < stage and all(self.stages[other] != stage for other in others):
                delay[sender] = delay.get(sender, 0.0) + seconds * self._factor(sender, stage)
        self.stages.append(stage)

    def _factor(self, sender: int, stage: int) -> float:
        a, b = self.objective.placement[sender], self.objective.placement[stage]
        return self.objective.machine.link_factor(a, b) if a != b else 0.0

    def _first_stage(self, v: int) -> int:
        strict = self.clusters.strict_arcs
        return max([self.earliest[v], *(self.stages[a] + ((a, v) in strict) for a in self.predecessors[v])])

    def _may_be_short(self, v: int) -> bool:
        """Return whether a cut that begins so can have an estimate below the limit, clusters from v on being free."""
        objective, speed = self.objective, self.objective.machine.speed
        work, m = [0.0] * (1 + max(objective.placement)), objective.microbatches
        room = [inf] * len(work)
        before: list[float] = []
        times = [spent / speed[device] for spent, device in zip(self.spent, objective.placement, strict=True)]
        for device, time in zip(objective.placement, times, strict=True):
            work[device] += time
        for s, device in enumerate(objective.placement):
            before.append(max((before[a] + self._path(a, times) + x for a, x in self.delay[s].items()), default=0.0))
            left = self.limit - before[s] - times[s] - (m - 1) * work[device]
            if left <= 0:
                return False
            room[device] = min(room[device], left / self.per_work * speed[device] if self.per_work else inf)
        return self.rest[v] * _ROUNDING <= sum(room)

    def _path(self, stage: int, times: Sequence[float]) -> float:
        if not self.objective.is_split:
            return times[stage]
        first = self.ahead[stage] / self.objective.machine.speed[self.objective.placement[stage]]
        return (times[stage] + first) / 2

    def _keep(self, cut: Cut) -> None:
        if cut in self.found or sum(map(bool, self.held)) < self.n_used:
            return
        score = self.objective.score(cut)
        if score[0] < self.limit:
            self.found[cut] = score
            self.best = sorted([*self.best, score[0]])[: self.most]
            self.limit = min(self.limit, self.best[-1])


def _arriving(objective: StepObjective) -> list[list[tuple[int, tuple[int, ...], float]]]:
    """Return, per cluster, the flows that it consumes: source, consumers that are assigned earlier, seconds. The source comes
    earlier, too.
    """
    arriving: list[list[tuple[int, tuple[int, ...], float]]] = [[] for _ in range(len(objective.clusters))]
    for flow in objective.clusters.flows:
        for place, consumer in enumerate(flow.consumers):
            if flow.source < consumer:
                arriving[consumer].append((flow.source, flow.consumers[:place], flow.time))
    return arriving
