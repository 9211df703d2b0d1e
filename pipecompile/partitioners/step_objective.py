"""The second objective: seconds of a step of M micro-batches, estimated from a cut alone, and a proven bound over all cuts.

    before(s), after(s) = seconds of the longest paths of stages and transfers to and from stage s, forward and back
    waits(s)            = what of after(s) the k(s) further micro-batches in flight on s cannot fill, k(s) stages being after it:
                          max(0, after - k * forward of s) at the begin, max(0, after - k * backward of s) at the end, at most after
                          (without a limit of memory: all stages of a higher number)
    trips(s)            = floor((M - 1) / h(s)) + 1 times from stage s to the end and back, h(s) micro-batches being in flight on s,
                          and a forward for each micro-batch that is left over
    through(a, b)       = seconds of the longest path that the transfers from stage a to b are on, forward and back
    step                = max over s of         before(s) + max(waits(s) + M * compute of the device of s, trips(s))
                              and over (a, b)   through(a, b) + (M - 1) * transfers between these devices, one way

The formulas are those of 1F1B. Where the schedule is short enough, the seconds of a walk of it (`schedule_walk.py`) count instead: the
formulas are up to 15 % too low where transfers are slow, and 10 % too high for schedules with fewer waits. The estimate orders cuts; a
simulation under the schedule that will run decides between the best of them (`planning/step_search.py`). Loads are as in `objective.py`,
but a transfer delays a path and occupies a link, not a device.

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

import numpy as np

from pipecompile.partitioners.clusters import Clusters, coarsen
from pipecompile.partitioners.cut_arrays import CutArrays, Edge, Floats
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import bottleneck
from pipecompile.partitioners.problem import Problem
from pipecompile.partitioners.schedule_walk import ScheduleWalk

__all__ = ["Score", "StepObjective", "step_lower_bound"]

Score = tuple[float, float]
"""(seconds of the step, sum over the stages of the step if that stage alone decided), compared lexicographically."""

_ROUNDING = 1 - 1e-9
"""Factor on bounds: sums in another order differ by rounding."""


_ABOVE = 1.15
"""Factor by which the formulas may be above the seconds of a walk."""

_KNOWN = 4096
"""Estimates that are kept, as a search comes back to its cuts: of a small graph, four of five were made before."""


@dataclass(frozen=True, slots=True)
class StepObjective:
    """The estimated seconds of a step. `placement` is the device of every stage, `microbatches` are the M of a step.

    `is_split`: backwards are divided in I and W, so that half of a backward delays no other stage. `walk`: the order of the
    schedule; without one, the formulas alone estimate.
    """

    clusters: Clusters
    machine: Machine
    placement: tuple[int, ...]
    microbatches: int
    is_split: bool = False
    walk: ScheduleWalk | None = None
    times: list[float] = field(init=False)
    """Seconds of each cluster at speed 1, recomputation included."""
    _columns: tuple[Floats, Floats] = field(init=False)
    """`times`, and the seconds of the forwards."""
    _arrays: CutArrays = field(init=False)
    _known: dict[tuple[tuple[int, ...], float], Score] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )
    """Scores by cut and limit."""

    def __post_init__(self) -> None:
        forward = np.array(self.clusters.forward, dtype=np.float64)
        times = np.array(self.clusters.time, dtype=np.float64) + all(self.machine.recompute) * forward
        object.__setattr__(self, "times", times.tolist())
        object.__setattr__(self, "_columns", (times, forward))
        object.__setattr__(self, "_arrays", CutArrays.of(self.clusters, self.machine, self.placement))

    @property
    def effort(self) -> int:
        """About the microseconds of an estimate, move included: the same number everywhere, so that searches find the same cuts."""
        visited = len(self.clusters) + len(self.clusters.arcs) + len(self.clusters.flows)
        walked = len(self.walk.actions) if self.walk else 0
        return 40 + visited // 30 + walked // 2

    def score(self, assignment: Sequence[int], limit: float = inf) -> Score:
        """Return the estimate for a stage per cluster; infinite if a device has too little memory. O(clusters + arcs + flows), and
        a walk. No walk is made for a cut that takes far more than `limit` seconds without one.
        """
        cut = tuple(assignment), limit
        if cut not in self._known:
            if len(self._known) >= _KNOWN:
                self._known.clear()
            self._known[cut] = self._score(*cut)
        return self._known[cut]

    def _score(self, assignment: tuple[int, ...], limit: float) -> Score:
        if self.machine.has_memory_limit and bottleneck(self.clusters, self.machine, assignment) == inf:
            return inf, inf
        stages = np.asarray(assignment)
        edges = self._arrays.edges(stages)
        times, forward = (self._arrays.stage_seconds(column, stages) for column in self._columns)
        paths, work = _StagePaths(times, forward, edges, self.is_split), self._work(times)
        ends = self._link_ends(edges, paths)
        for s, device in enumerate(self.placement):
            ends.append(self._end(s, paths, work[device]))
        seconds = max(ends)
        if self.walk is not None and seconds <= limit * _ABOVE:
            seconds = self.walk.seconds(times, forward, edges)
        return seconds, sum(ends)

    def _end(self, s: int, walk: _StagePaths, work: float) -> float:
        """Return the seconds of the step if stage `s` alone decided. `work` is that of its device for a micro-batch."""
        chain = len(self.placement) - 1 - s  # stages of a higher number
        depth = walk.depth[s] if self.machine.has_memory_limit else chain
        after, forward, time = walk.after[s], walk.forward[s], walk.times[s]
        waits = max(0.0, after - depth * forward) + max(0.0, after - depth * (time - forward))
        even = time + min(after, waits) + (self.microbatches - 1) * work
        held = depth + 1 + max(0, round(self.machine.in_flight[s]) - chain - 1)
        more, rest = divmod(self.microbatches - 1, held)
        trips = (more + 1) * (walk.path[s] + after) + rest * forward
        return walk.before[s] + max(even, trips)

    def _link_ends(self, edges: list[Edge], walk: _StagePaths) -> list[float]:
        """Return the seconds of the step if one link alone decided, for every pair of stages with transfers."""
        load: dict[frozenset[int], float] = {}
        pairs = [(a, b, frozenset((self.placement[a], self.placement[b])), delay) for (a, b), delay in edges if delay]
        for _, _, link, delay in pairs:
            load[link] = load.get(link, 0.0) + delay / 2
        return [
            walk.before[a] + walk.path[a] + delay + walk.path[b] + walk.after[b] + (self.microbatches - 1) * load[link]
            for a, b, link, delay in pairs
        ]

    def can_save(self, assignment: Sequence[int], share: float, least_work: float = inf) -> bool:
        """Return whether the shortest path of stages, or `least_work` on the slowest device, could shorten the estimated step by
        this fraction.
        """
        ends = [0.0] * len(self.clusters)
        for a, b in self.clusters.arcs:  # sorted, and clusters are in topological order
            ends[b] = max(ends[b], ends[a] + self.times[a])
        path = max((end + time for end, time in zip(ends, self.times, strict=True)), default=0.0)
        now, work = self.score(assignment)[0], min(max(self.work(assignment)), least_work)
        return path / max(self.machine.speed) + (self.microbatches - 1) * work < now * (1 - share)

    def work(self, assignment: Sequence[int]) -> list[float]:
        """Return the seconds of every device for a micro-batch, forward and back."""
        return self._work(self.stage_times(assignment))

    def _work(self, times: Sequence[float]) -> list[float]:
        work = [0.0] * (1 + max(self.placement))
        for device, time in zip(self.placement, times, strict=True):
            work[device] += time
        return work

    def stage_times(self, assignment: Sequence[int]) -> list[float]:
        """Return the seconds of every stage for a micro-batch, forward and back."""
        return self._arrays.stage_seconds(self._columns[0], assignment)

    def edges(self, assignment: Sequence[int]) -> list[Edge]:
        """Return the pairs of stages that depend on each other, ascending, with the seconds of their transfers both ways."""
        return self._arrays.edges(assignment)


class _StagePaths:
    """The stages of a cut as a DAG: seconds of each, of the longest paths to and from it, and the stages after it."""

    def __init__(self, times: list[float], forward: list[float], edges: list[Edge], is_split: bool) -> None:
        n = len(times)
        self.times, self.forward = times, forward
        self.path = [(time + first) / 2 for time, first in zip(times, forward, strict=True)] if is_split else times
        self.before, self.after, self.depth = [0.0] * n, [0.0] * n, [0] * n
        for (a, b), delay in edges:
            self.before[b] = max(self.before[b], self.before[a] + self.path[a] + delay)
        for (a, b), delay in reversed(edges):
            self.after[a] = max(self.after[a], self.after[b] + self.path[b] + delay)
            self.depth[a] = max(self.depth[a], self.depth[b] + 1)


def step_lower_bound(
    problem: Problem,
    n_stages: int,
    placement: Sequence[int],
    microbatches: int,
    *,
    is_split: bool = False,
    without_gradient: Collection[str] = (),
    copies: int = 1,
) -> float:
    """Return the seconds that every cut needs at least for a step of `microbatches` micro-batches, under every schedule that runs
    F before B, with `copies` copies of each stage.

    `is_split`: backwards are divided in I and W, so that what waits for a backward need not wait for all of it. `without_gradient`
    are the nodes whose values have none, so that nothing flows back.
    """
    clusters, machine = coarsen(problem), Machine.of(problem, n_stages)
    speeds, m = [machine.speed[device] for device in set(placement)], microbatches
    fastest = max(speeds)
    work = max(sum(clusters.time) / sum(speeds), max(clusters.time, default=0.0) / fastest / copies)
    path = _longest_path(problem, is_split, without_gradient) / fastest
    bounds = [m * work, path]
    if len(set(placement)) == n_stages and not is_split and copies == 1:
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
