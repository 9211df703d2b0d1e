"""The objective: load and memory of every device under an assignment of clusters to stages. The only place that defines it.

    compute(d)  = (time + forward of stages on d that recompute) / speed[d]
    sent(d)     = time * factor of the link, over tensors from d: the sum over receiving devices, or with multicast the maximum
    received(d) = time * factor of the link, over tensors from other devices with a consumer on d, once each
    load(d)     = compute + sent + received, or with overlap the maximum of the three
    memory(d)   = bytes, shared bytes once, and per stage on d   in_flight * (activation + bytes of tensors from other stages)
                  or, if the stage recomputes,                   in_flight * bytes of tensors from other stages + activation

The bottleneck is the largest load. Without a placement, devices are stages. Times are in seconds, memory in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf

from pipecompile.partitioners.clusters import Clusters, singleton_clusters
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.problem import Problem

__all__ = ["TOLERANCE", "LoadTracker", "StageLoad", "bottleneck", "fits", "stage_loads"]

TOLERANCE = 1e-9
"""Relative tolerance of every comparison with a memory limit. Sums in another order differ by rounding."""

MAX_EXHAUSTIVE = 12
"""Undecided stages on one device up to which all choices of recomputation are tried, 2^12 of them; beyond, greedily."""


@dataclass(frozen=True, slots=True)
class StageLoad:
    """The load of one device, in seconds, with its parts, and its memory in bytes. The bottleneck is the maximum load."""

    compute: float
    sent: float
    received: float
    memory: float
    load: float


def stage_loads(
    problem: Problem, stage_of: Mapping[str, int], n_stages: int, recompute: Sequence[bool] | None = None
) -> tuple[StageLoad, ...]:
    """Return the load of every device of an assignment of nodes; without `recompute`, under the best choice of it."""
    machine = Machine.of(problem, n_stages)
    assignment = [stage_of[node.name] for node in problem.nodes]
    return LoadTracker(singleton_clusters(problem), machine, assignment).device_loads(recompute)


def bottleneck(clusters: Clusters, machine: Machine, assignment: Sequence[int]) -> float:
    """Return the largest load of an assignment; infinite if it does not fit in memory."""
    return LoadTracker(clusters, machine, assignment).bottleneck()


def fits(memory: float, limit: float) -> bool:
    """Return whether `memory` bytes are within the limit, up to rounding."""
    return memory <= limit * (1 + TOLERANCE)


class LoadTracker:
    """The loads of an assignment of clusters to stages, updated incrementally as clusters move."""

    def __init__(self, clusters: Clusters, machine: Machine, assignment: Sequence[int]) -> None:
        self.clusters, self.machine, self.assignment = clusters, machine, list(assignment)
        n, n_devices = len(machine), len(machine.speed)
        self.stages_on = machine.stages_by_device()
        self.time, self.forward, self.bytes, self.activation, self.inbox = ([0.0] * n for _ in range(5))
        self.sent, self.received, self.shared = ([0.0] * n_devices for _ in range(3))
        self.consumer_counts: list[dict[int, int]] = [{} for _ in clusters.flows]  # flow -> stage -> consumers there
        self.user_counts: list[dict[int, int]] = [{} for _ in clusters.shared]  # shared bytes -> device -> users there
        self._flows_of: list[list[int]] | None = None
        self._shared_of: list[list[int]] | None = None
        for cluster, s in enumerate(self.assignment):
            self._add_cluster(cluster, s, 1)
        for number, flow in enumerate(clusters.flows):
            for consumer in flow.consumers:
                _count(self.consumer_counts[number], self.assignment[consumer], 1)
            self._add_flow(number, 1)
        for number, (users, size) in enumerate(clusters.shared):
            for user in users:
                self._add_user(number, size, machine.device_of[self.assignment[user]], 1)

    # -- moves ------------------------------------------------------------------------------------------------------

    def move(self, cluster: int, target: int) -> None:
        """Move a cluster to another stage. O(stages that consume the flows of the cluster)."""
        if self._flows_of is None or self._shared_of is None:
            self._flows_of, self._shared_of = self._incidence()
        origin = self.assignment[cluster]
        self._add_cluster(cluster, origin, -1)
        self._add_cluster(cluster, target, 1)
        for number in self._flows_of[cluster]:
            self._add_flow(number, -1)
            if self.clusters.flows[number].source != cluster:
                _count(self.consumer_counts[number], origin, -1)
                _count(self.consumer_counts[number], target, 1)
        self.assignment[cluster] = target
        for number in self._flows_of[cluster]:
            self._add_flow(number, 1)
        for number in self._shared_of[cluster]:
            size = self.clusters.shared[number][1]
            self._add_user(number, size, self.machine.device_of[origin], -1)
            self._add_user(number, size, self.machine.device_of[target], 1)

    def _incidence(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return, per cluster, the flows that it sends or consumes, and the shared bytes that it uses."""
        flows: list[list[int]] = [[] for _ in self.assignment]
        shared: list[list[int]] = [[] for _ in self.assignment]
        for number, flow in enumerate(self.clusters.flows):
            for end in (flow.source, *flow.consumers):
                flows[end].append(number)
        for number, (users, _) in enumerate(self.clusters.shared):
            for user in users:
                shared[user].append(number)
        return flows, shared

    def _add_cluster(self, cluster: int, s: int, sign: int) -> None:
        self.time[s] += sign * self.clusters.time[cluster]
        self.forward[s] += sign * self.clusters.forward[cluster]
        self.bytes[s] += sign * self.clusters.bytes[cluster]
        self.activation[s] += sign * self.clusters.activation[cluster]

    def _add_flow(self, number: int, sign: int) -> None:
        flow, machine = self.clusters.flows[number], self.machine
        source_stage = self.assignment[flow.source]
        source = machine.device_of[source_stage]
        time_to: dict[int, float] = {}
        for s in self.consumer_counts[number]:
            if s != source_stage:
                self.inbox[s] += sign * flow.bytes
            if (device := machine.device_of[s]) != source:
                time_to[device] = flow.time * machine.link_factor(source, device)
        if time_to:
            self.sent[source] += sign * (max if machine.multicast else sum)(time_to.values())
            for device, time in time_to.items():
                self.received[device] += sign * time

    def _add_user(self, number: int, size: float, device: int, change: int) -> None:
        before = device in self.user_counts[number]
        _count(self.user_counts[number], device, change)
        self.shared[device] += size * ((device in self.user_counts[number]) - before)

    # -- loads ------------------------------------------------------------------------------------------------------

    def device_loads(self, recompute: Sequence[bool] | None = None) -> tuple[StageLoad, ...]:
        """Return the load of every device; without `recompute`, under the best choice of stages that recompute."""
        return tuple(self._device_load(d, recompute) for d in range(len(self.stages_on)))

    def load(self, device: int) -> float:
        """Return the load of a device; infinite if it does not fit in memory."""
        row = self._device_load(device, None)
        return row.load if fits(row.memory, self.machine.memory_limit[device]) else inf

    def bottleneck(self) -> float:
        """Return the largest load; infinite if a device does not fit in memory."""
        return max(self.load(d) for d in range(len(self.stages_on)))

    def recompute(self) -> tuple[bool, ...]:
        """Return, per stage, whether it recomputes: as the problem requires, else the fastest choice that fits."""
        chosen = {s for d in range(len(self.stages_on)) for s in self._recomputing(d)}
        return tuple(s in chosen for s in range(len(self.machine)))

    def _device_load(self, device: int, recompute: Sequence[bool] | None) -> StageLoad:
        stages, speed = self.stages_on[device], self.machine.speed[device]
        recomputing = self._recomputing(device) if recompute is None else [s for s in stages if recompute[s]]
        compute = (sum(self.time[s] for s in stages) + sum(self.forward[s] for s in recomputing)) / speed
        memory = self._memory_without_recompute(device) - sum(self._saving(s) for s in recomputing)
        parts = compute, self.sent[device], self.received[device]
        return StageLoad(*parts, memory, max(parts) if self.machine.overlap else sum(parts))

    def _memory_without_recompute(self, device: int) -> float:
        in_flight = self.machine.in_flight
        stages = self.stages_on[device]
        return self.shared[device] + sum(
            self.bytes[s] + in_flight[s] * (self.activation[s] + self.inbox[s]) for s in stages
        )

    def _saving(self, s: int) -> float:
        """Return the bytes that recomputation saves on stage s."""
        return (self.machine.in_flight[s] - 1) * self.activation[s]

    def _recomputing(self, device: int) -> list[int]:
        """Return the stages of a device that recompute: those that must, and the cheapest others needed to fit."""
        stages = self.stages_on[device]
        required = [s for s in stages if self.machine.recompute[s]]
        optional = [s for s in stages if self.machine.recompute[s] is None and self._saving(s) > 0]
        memory = 0.0
        if optional:
            memory = self._memory_without_recompute(device) - sum(self._saving(s) for s in required)
        limit = self.machine.memory_limit[device]
        if not optional or fits(memory, limit):
            return required
        if fits(memory - sum(self._saving(s) for s in optional), limit):
            optional = self._cheapest(optional, memory, limit)
        return required + optional

    def _cheapest(self, optional: list[int], memory: float, limit: float) -> list[int]:
        """Return the stages with the least forward time whose savings suffice; greedy beyond `MAX_EXHAUSTIVE` stages."""
        if len(optional) > MAX_EXHAUSTIVE:
            optional = sorted(optional, key=lambda s: self._saving(s) / (self.forward[s] or 1e-300), reverse=True)
            while len(optional) > 1 and fits(memory - sum(self._saving(s) for s in optional[:-1]), limit):
                optional = optional[:-1]
            return optional
        choices = (
            [s for s, chosen in zip(optional, bits, strict=True) if chosen]
            for bits in product((False, True), repeat=len(optional))
        )
        sufficient = (choice for choice in choices if fits(memory - sum(self._saving(s) for s in choice), limit))
        return min(sufficient, key=lambda choice: sum(self.forward[s] for s in choice))


def _count(counts: dict[int, int], key: int, change: int) -> None:
    """Add `change` to a count; drop a key whose count becomes 0."""
    if not (counts.setdefault(key, 0) + change):
        del counts[key]
    else:
        counts[key] += change
