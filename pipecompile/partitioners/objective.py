"""The objective, in one place: what every device has to do and to hold under an assignment of clusters to stages.

    compute(d)  = (time + forward of stages on d that recompute) / speed[d]
    sent(d)     = time * factor of the link, over tensors from d: once per receiving device, or with multicast once, the dearest
    received(d) = time * factor of the link, over tensors from elsewhere that are read on d, once each
    load(d)     = compute + sent + received, or with overlap the largest of the three
    memory(d)   = bytes, shared bytes once, and per stage on d   in_flight * (activation + bytes of tensors from other stages)
                  or, when it recomputes,                        in_flight * bytes of tensors from other stages + activation

The bottleneck is the largest load. Without a placement, devices are stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf

from pipecompile.errors import VerifyError
from pipecompile.partitioners.clusters import Clusters, clusters_of
from pipecompile.partitioners.machine import Stages
from pipecompile.partitioners.problem import Problem
from pipecompile.partitioners.verify import assignment_faults

__all__ = ["TOLERANCE", "Ledger", "StageLoad", "bottleneck", "fits", "loads", "stage_loads", "verify_assignment"]

TOLERANCE = 1e-9
"""Relative slack of every comparison with a memory limit: sums in another order differ by rounding."""

MANY = 12
"""Undecided stages on one device up to which all choices of recomputation are tried."""


@dataclass(frozen=True, slots=True)
class StageLoad:
    """One device of an assignment. `load` is what the bottleneck is the maximum of."""

    compute: float
    sent: float
    received: float
    memory: float
    load: float


def stage_loads(
    problem: Problem, stage_of: Mapping[str, int], n_stages: int, recompute: Sequence[bool] | None = None
) -> tuple[StageLoad, ...]:
    """The load of every device of an assignment of nodes, by default with the best choice of stages that recompute."""
    stages = Stages.of(problem, n_stages)
    return Ledger(clusters_of(problem), stages, [stage_of[node.name] for node in problem.nodes]).rows(recompute)


def loads(clusters: Clusters, stages: Stages, stage: Sequence[int]) -> tuple[StageLoad, ...]:
    """The same for an assignment of clusters. O(clusters + flows)."""
    return Ledger(clusters, stages, stage).rows()


def bottleneck(clusters: Clusters, stages: Stages, stage: Sequence[int]) -> float:
    """The largest load of an assignment; infinite when it does not fit in memory."""
    return Ledger(clusters, stages, stage).bottleneck()


def fits(memory: float, limit: float) -> bool:
    """Whether so much memory is within the limit, up to rounding."""
    return memory <= limit * (1 + TOLERANCE)


def verify_assignment(
    problem: Problem, stage_of: Mapping[str, int], n_stages: int, recompute: Sequence[bool] | None = None
) -> None:
    """Raise VerifyError with every fault of an assignment: coverage, range, precedence, groups, steering, memory."""
    faults = assignment_faults(problem, stage_of, n_stages)
    placed = {node.name: stage_of.get(node.name, -1) for node in problem.nodes}
    stages = Stages.of(problem, n_stages)
    for s, (asked, done) in enumerate(zip(stages.recompute, recompute or (), strict=False)):
        if asked is not None and asked != done:
            faults.append(f"stage {s} {'recomputes' if done else 'does not recompute'}, the problem wants the opposite")
    if all(0 <= stage < n_stages for stage in placed.values()):
        unit = "stage" if stages.direct else "device"
        rows = stage_loads(problem, placed, n_stages, recompute)
        for number, (load, limit) in enumerate(zip(rows, stages.limit, strict=True)):
            if not fits(load.memory, limit):
                faults.append(f"{unit} {number} holds {load.memory:g} bytes, its limit is {limit:g}")
    if faults:
        raise VerifyError("partition", faults)


class Ledger:
    """An assignment of clusters to stages and what it costs, kept up to date from move to move."""

    def __init__(self, clusters: Clusters, stages: Stages, stage: Sequence[int]) -> None:
        self.clusters, self.stages, self.stage = clusters, stages, list(stage)
        n, devices = len(stages), len(stages.speed)
        self.stages_on = [stages.on(d) for d in range(devices)]
        self.time, self.forward, self.bytes, self.activation, self.inbox = ([0.0] * n for _ in range(5))
        self.sent, self.received, self.shared = ([0.0] * devices for _ in range(3))
        self.readers: list[dict[int, int]] = [{} for _ in clusters.flows]
        self.users: list[dict[int, int]] = [{} for _ in clusters.shared]
        self._flows_at: list[list[int]] | None = None
        self._shared_at: list[list[int]] | None = None
        for cluster, s in enumerate(self.stage):
            self._add(cluster, s, 1)
        for number, flow in enumerate(clusters.flows):
            for consumer in flow.consumers:
                _count(self.readers[number], self.stage[consumer], 1)
            self._charge(number, 1)
        for number, (users, held) in enumerate(clusters.shared):
            for user in users:
                self._use(number, held, stages.device[self.stage[user]], 1)

    # -- moves ------------------------------------------------------------------------------------------------------

    def move(self, cluster: int, target: int) -> None:
        """Put a cluster into another stage. O(stages that read the flows of this cluster)."""
        if self._flows_at is None or self._shared_at is None:
            self._flows_at, self._shared_at = self._ends()
        origin = self.stage[cluster]
        self._add(cluster, origin, -1)
        self._add(cluster, target, 1)
        for number in self._flows_at[cluster]:
            self._charge(number, -1)
            if self.clusters.flows[number].source != cluster:
                _count(self.readers[number], origin, -1)
                _count(self.readers[number], target, 1)
        self.stage[cluster] = target
        for number in self._flows_at[cluster]:
            self._charge(number, 1)
        for number in self._shared_at[cluster]:
            held = self.clusters.shared[number][1]
            self._use(number, held, self.stages.device[origin], -1)
            self._use(number, held, self.stages.device[target], 1)

    def _ends(self) -> tuple[list[list[int]], list[list[int]]]:
        """Per cluster the flows it sends or reads, and the shared bytes it uses."""
        flows: list[list[int]] = [[] for _ in self.stage]
        shared: list[list[int]] = [[] for _ in self.stage]
        for number, flow in enumerate(self.clusters.flows):
            for end in (flow.source, *flow.consumers):
                flows[end].append(number)
        for number, (users, _) in enumerate(self.clusters.shared):
            for user in users:
                shared[user].append(number)
        return flows, shared

    def _add(self, cluster: int, s: int, sign: int) -> None:
        self.time[s] += sign * self.clusters.time[cluster]
        self.forward[s] += sign * self.clusters.forward[cluster]
        self.bytes[s] += sign * self.clusters.bytes[cluster]
        self.activation[s] += sign * self.clusters.activation[cluster]

    def _charge(self, number: int, sign: int) -> None:
        flow, stages = self.clusters.flows[number], self.stages
        source = self.stage[flow.source]
        home = stages.device[source]
        away: dict[int, float] = {}
        for s in self.readers[number]:
            if s != source:
                self.inbox[s] += sign * flow.bytes
            if (device := stages.device[s]) != home:
                away[device] = flow.time * stages.factor(home, device)
        if away:
            self.sent[home] += sign * (max if stages.multicast else sum)(away.values())
            for device, time in away.items():
                self.received[device] += sign * time

    def _use(self, number: int, held: float, device: int, change: int) -> None:
        before = device in self.users[number]
        _count(self.users[number], device, change)
        self.shared[device] += held * ((device in self.users[number]) - before)

    # -- what it costs ----------------------------------------------------------------------------------------------

    def rows(self, recompute: Sequence[bool] | None = None) -> tuple[StageLoad, ...]:
        """What every device does and holds, by default with the best choice of stages that recompute."""
        return tuple(self._row(d, recompute) for d in range(len(self.stages_on)))

    def load(self, device: int) -> float:
        """The load of a device; infinite when it does not fit in memory."""
        row = self._row(device, None)
        return row.load if fits(row.memory, self.stages.limit[device]) else inf

    def bottleneck(self) -> float:
        return max(self.load(d) for d in range(len(self.stages_on)))

    def recompute(self) -> tuple[bool, ...]:
        """Which stages recompute: as the problem says, or what costs the least time among what fits."""
        redone = {s for d in range(len(self.stages_on)) for s in self._redone(d)}
        return tuple(s in redone for s in range(len(self.stages)))

    def _row(self, device: int, recompute: Sequence[bool] | None) -> StageLoad:
        here, speed = self.stages_on[device], self.stages.speed[device]
        redone = self._redone(device) if recompute is None else [s for s in here if recompute[s]]
        compute = (sum(self.time[s] for s in here) + sum(self.forward[s] for s in redone)) / speed
        memory = self._kept(device) - sum(self._saving(s) for s in redone)
        parts = compute, self.sent[device], self.received[device]
        return StageLoad(*parts, memory, max(parts) if self.stages.overlap else sum(parts))

    def _kept(self, device: int) -> float:
        """The memory of a device on which no stage recomputes."""
        flying = self.stages.in_flight
        here = self.stages_on[device]
        return self.shared[device] + sum(self.bytes[s] + flying[s] * (self.activation[s] + self.inbox[s]) for s in here)

    def _saving(self, s: int) -> float:
        return (self.stages.in_flight[s] - 1) * self.activation[s]

    def _redone(self, device: int) -> list[int]:
        """The stages of a device that recompute: those that must, and the cheapest others that are needed to fit."""
        here = self.stages_on[device]
        redone = [s for s in here if self.stages.recompute[s]]
        free = [s for s in here if self.stages.recompute[s] is None and self._saving(s) > 0]
        need = self._kept(device) - sum(self._saving(s) for s in redone) if free else 0.0
        limit = self.stages.limit[device]
        if not free or fits(need, limit):
            return redone
        if fits(need - sum(self._saving(s) for s in free), limit):
            free = self._least(free, need, limit)
        return redone + free

    def _least(self, free: list[int], need: float, limit: float) -> list[int]:
        """The stages with the least forward time whose savings are enough; a greedy choice of them when they are many."""
        if len(free) > MANY:
            free = sorted(free, key=lambda s: self._saving(s) / (self.forward[s] or 1e-300), reverse=True)
            while len(free) > 1 and fits(need - sum(self._saving(s) for s in free[:-1]), limit):
                free = free[:-1]
            return free
        choices = (
            [s for s, taken in zip(free, bits, strict=True) if taken]
            for bits in product((False, True), repeat=len(free))
        )
        enough = (some for some in choices if fits(need - sum(self._saving(s) for s in some), limit))
        return min(enough, key=lambda some: sum(self.forward[s] for s in some))


def _count(counts: dict[int, int], key: int, change: int) -> None:
    if not (counts.setdefault(key, 0) + change):
        del counts[key]
    else:
        counts[key] += change
