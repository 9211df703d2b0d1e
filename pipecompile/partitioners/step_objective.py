"""The second objective: seconds of a step of M micro-batches, estimated from a cut alone, and a proven bound over all cuts.

    before(s), after(s) = seconds of the longest paths of stages and transfers to and from stage s, forward and back
    waits(s)            = what of after(s) the k(s) further micro-batches in flight on s cannot fill, k(s) stages being after it:
                          max(0, after - k * forward of s) at the begin, max(0, after - k * backward of s) at the end, at most after
                          (without a limit of memory: all stages of a higher number)
    step                = max over s of   before(s) + waits(s) + M * compute of the device of s

The estimate is that of 1F1B. It orders cuts; a simulation under the schedule that will run decides between the best of
them (`planning/step_search.py`). Loads are as in `objective.py`, but a transfer delays a path and does not occupy a device.

    bound      = max of   M * total / devices,  M * largest cluster       work
                          the longest path of operations                  one micro-batch, forward and back
                          W / (1 - (1 - 1/M)^P)                           a path of W seconds over P devices, a stage each

The last is the pipeline bound: on a path, device d works M * W_d seconds, and waits for W_0 + ... + W_(d-1) before and after. The
sum of all W_d for which this is at most T is T * (1 - (1 - 1/M)^P).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from math import inf

from pipecompile.partitioners.clusters import Clusters, coarsen
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import bottleneck
from pipecompile.partitioners.problem import Problem

__all__ = ["Score", "StepObjective", "step_lower_bound"]

Score = tuple[float, float]
"""(seconds of the step, sum over the stages of the step if that stage alone decided), compared lexicographically."""

_ROUNDING = 1 - 1e-9
"""Factor on bounds: sums in another order differ by rounding."""


@dataclass(frozen=True, slots=True)
class StepObjective:
    """The estimated seconds of a step. `placement` is the device of every stage, `microbatches` are the M of a step.

    `is_split`: backwards are divided in I and W, so that half of a backward delays no other stage.
    """

    clusters: Clusters
    machine: Machine
    placement: tuple[int, ...]
    microbatches: int
    is_split: bool = False
    times: list[float] = field(init=False)
    """Seconds of each cluster at speed 1, recomputation included."""
    _sinks: list[int] = field(init=False)

    def __post_init__(self) -> None:
        redone = all(self.machine.recompute)
        columns = zip(self.clusters.time, self.clusters.forward, strict=True)
        object.__setattr__(self, "times", [time + redone * forward for time, forward in columns])
        sources = {a for a, _ in self.clusters.arcs}
        object.__setattr__(self, "_sinks", [v for v in range(len(self.clusters)) if v not in sources])

    def score(self, assignment: Sequence[int]) -> Score:
        """Return the estimate for a stage per cluster; infinite if a device has too little memory. O(clusters + arcs + flows)."""
        if self.machine.has_memory_limit and bottleneck(self.clusters, self.machine, assignment) == inf:
            return inf, inf
        times, edges = self.stage_times(assignment), self.edges(assignment)
        forward = self._stage_times(self.clusters.forward, assignment)
        path = [(time + first) / 2 for time, first in zip(times, forward, strict=True)] if self.is_split else times
        n = len(times)
        before, after, depth, work = [0.0] * n, [0.0] * n, [0] * n, [0.0] * (1 + max(self.placement))
        for (a, b), delay in edges:
            before[b] = max(before[b], before[a] + path[a] + delay)
        for (a, b), delay in reversed(edges):
            after[a] = max(after[a], after[b] + path[b] + delay)
            depth[a] = max(depth[a], depth[b] + 1)
        for stage, device in enumerate(self.placement):
            work[device] += times[stage]
        ends = []
        if not self.machine.has_memory_limit:
            depth = list(reversed(range(n)))
        for s, device in enumerate(self.placement):
            waits = max(0.0, after[s] - depth[s] * forward[s]) + max(0.0, after[s] - depth[s] * (times[s] - forward[s]))
            ends.append(before[s] + times[s] + min(after[s], waits) + (self.microbatches - 1) * work[device])
        return max(ends), sum(ends)

    def can_save(self, assignment: Sequence[int], share: float) -> bool:
        """Return whether a shorter path of stages alone could shorten the estimated step by this fraction."""
        ends = [0.0] * len(self.clusters)
        for a, b in self.clusters.arcs:  # sorted, and clusters are in topological order
            ends[b] = max(ends[b], ends[a] + self.times[a])
        path = max((end + time for end, time in zip(ends, self.times, strict=True)), default=0.0)
        now, work = self.score(assignment)[0], [0.0] * (1 + max(self.placement))
        for stage, time in enumerate(self.stage_times(assignment)):
            work[self.placement[stage]] += time
        return path / max(self.machine.speed) + (self.microbatches - 1) * max(work) < now * (1 - share)

    def stage_times(self, assignment: Sequence[int]) -> list[float]:
        """Return the seconds of every stage for a micro-batch, forward and back."""
        return self._stage_times(self.times, assignment)

    def _stage_times(self, column: Sequence[float], assignment: Sequence[int]) -> list[float]:
        times = [0.0] * len(self.placement)
        for time, stage in zip(column, assignment, strict=True):
            times[stage] += time
        return [time / self.machine.speed[device] for time, device in zip(times, self.placement, strict=True)]

    def edges(self, assignment: Sequence[int]) -> list[tuple[tuple[int, int], float]]:
        """Return the pairs of stages that depend on each other, ascending, with the seconds of their transfers both ways."""
        edges: dict[tuple[int, int], float] = {}
        for a, b in self.clusters.arcs:
            if assignment[a] != assignment[b]:
                edges[assignment[a], assignment[b]] = 0.0
        for flow in self.clusters.flows:
            source = assignment[flow.source]
            sent = {(source, stage) for stage in {assignment[c] for c in flow.consumers} if stage > source}
            for a, b in sent:
                factor = self.machine.link_factor(self.placement[a], self.placement[b])
                seconds = flow.time * factor if self.placement[a] != self.placement[b] else 0.0
                edges[a, b] = edges.get((a, b), 0.0) + seconds
        last = len(self.placement) - 1
        for sink in self._sinks:
            if assignment[sink] != last:  # outputs go to the loss
                edges.setdefault((assignment[sink], last), 0.0)
        return sorted(edges.items())


def step_lower_bound(
    problem: Problem,
    n_stages: int,
    placement: Sequence[int],
    microbatches: int,
    *,
    is_split: bool = False,
    without_gradient: Collection[str] = (),
) -> float:
    """Return the seconds that every cut needs at least for a step of `microbatches` micro-batches, under every schedule that runs
    F before B.

    `is_split`: backwards are divided in I and W, so that what waits for a backward need not wait for all of it. `without_gradient`
    are the nodes whose values have none, so that nothing flows back.
    """
    clusters, machine = coarsen(problem), Machine.of(problem, n_stages)
    speeds, m = [machine.speed[device] for device in set(placement)], microbatches
    fastest = max(speeds)
    work = max(sum(clusters.time) / sum(speeds), max(clusters.time, default=0.0) / fastest)
    path = _longest_path(problem, is_split, without_gradient) / fastest
    bounds = [m * work, path]
    if len(set(placement)) == n_stages and not is_split:
        bounds.append(path / (1 - (1 - 1 / m) ** n_stages))
    return max(bounds) * _ROUNDING


def _longest_path(problem: Problem, is_split: bool, without_gradient: Collection[str]) -> float:
    """Return the seconds of the longest path of values with gradients, forward and, unless `is_split`, backward."""
    times = {node.name: node.forward if is_split else node.time for node in problem.nodes}
    sources: dict[str, set[str]] = {name: set() for name in times}
    arcs = set(problem.precedence)
    for tensor in problem.tensors:
        if tensor.source not in without_gradient:
            for consumer in tensor.consumers:
                if (tensor.source, consumer) in arcs:  # a tensor alone implies no precedence
                    sources[consumer].add(tensor.source)
    ends: dict[str, float] = {}
    for name in TopologicalSorter(sources).static_order():
        ends[name] = times[name] + max((ends[source] for source in sources[name]), default=0.0)
    return max(ends.values(), default=0.0)
