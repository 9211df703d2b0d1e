"""Memory of devices, and the choice of stages that recompute, as rows and variables of the integer program.

    recompute(s) = 1                                    stage s recomputes: fixed by the problem, else a variable
    excess(s) >= (in_flight - 1) * activation(s)        unless recompute(s): activations beyond one micro-batch
    recompute_time(s) >= forward(s)                     if recompute(s)

The solver decides only where that can help: more than one micro-batch in flight, some activation, and a memory limit.
"""

from __future__ import annotations

from math import isfinite

from pipecompile.partitioners.clusters import Clusters
from pipecompile.partitioners.ilp.solver_backend import LinearExpr
from pipecompile.partitioners.ilp.step_variables import ONE, ZERO, StepVariables
from pipecompile.partitioners.ilp.traffic_rows import TrafficRows
from pipecompile.partitioners.machine import Machine

__all__ = ["MemoryRows"]


class MemoryRows:
    """Expressions for the memory of devices, in `unit` bytes, and the recomputation time of stages, in `scale` seconds.

    `members[s]` are the clusters that may be in stage s. `max_limit` is the largest finite memory limit, in bytes.
    """

    def __init__(
        self,
        steps: StepVariables,
        clusters: Clusters,
        machine: Machine,
        traffic: TrafficRows,
        scale: float,
        unit: float,
        max_limit: float,
    ) -> None:
        self.steps, self.clusters, self.machine, self.traffic = steps, clusters, machine, traffic
        self.scale, self.unit, self.max_limit = scale, unit, max_limit
        self.members = [[v for v in range(len(clusters)) if steps.is_possible(v, s)] for s in range(len(machine))]
        self.recompute = [self._recompute(s) for s in range(len(machine))]

    def recompute_time(self, s: int) -> LinearExpr:
        """Return the forward time of stage s if it recomputes, else 0. (It is a part of a load, so at most 1.)"""
        recompute = self.recompute[s]
        if recompute is ZERO:
            return ZERO
        forward = LinearExpr()
        for v in self.members[s]:
            forward.add(self.steps.in_stage(v, s), self.clusters.forward[v] / self._speed(s) / self.scale)
        if recompute is ONE:
            return forward
        most = min(1.0, sum(self.clusters.forward[v] for v in self.members[s]) / self._speed(s) / self.scale)
        return self.steps.mip.add_maximum([forward + recompute * most - most])

    def memory(self, device: int) -> LinearExpr:
        """Return the memory of a device."""
        clusters, machine, unit = self.clusters, self.machine, self.unit
        memory = LinearExpr()
        for s in machine.stages_on(device):
            for v in self.members[s]:
                memory.add(self.steps.in_stage(v, s), (clusters.bytes[v] + clusters.activation[v]) / unit)
            memory.add(self._excess(s))
            for number, flow in enumerate(clusters.flows):
                if flow.bytes and any(self.steps.is_possible(consumer, s) for consumer in flow.consumers):
                    memory.add(self.traffic.receives(number, flow, s), machine.in_flight[s] * flow.bytes / unit)
        for users, size in clusters.shared:
            memory.add(self.steps.mip.add_maximum(self._on_device(user, device) for user in users), size / unit)
        return memory

    def _recompute(self, s: int) -> LinearExpr:
        required = self.machine.recompute[s]
        if required is not None:
            return ONE if required else ZERO
        has_activation = any(self.clusters.activation[v] for v in self.members[s])
        is_limited = isfinite(self.machine.memory_limit[self.machine.device_of[s]])
        helps = has_activation and self.machine.in_flight[s] > 1 and is_limited
        return self.steps.mip.add_variable(integer=True) if helps else ZERO

    def _excess(self, s: int) -> LinearExpr:
        """Return the activations of stage s beyond one micro-batch."""
        recompute, extra = self.recompute[s], self.machine.in_flight[s] - 1
        if recompute is ONE or not extra:
            return ZERO
        excess = LinearExpr()
        for v in self.members[s]:
            excess.add(self.steps.in_stage(v, s), extra * self.clusters.activation[v] / self.unit)
        if recompute is ZERO:
            return excess
        most = extra * min(sum(self.clusters.activation[v] for v in self.members[s]), self.max_limit) / self.unit
        return self.steps.mip.add_maximum([excess - recompute * most], most)

    def _on_device(self, cluster: int, device: int) -> LinearExpr:
        """Return 1 iff the cluster is on the device."""
        on_device = LinearExpr()
        for s in self.machine.stages_on(device):
            on_device.add(self.steps.in_stage(cluster, s))
        return on_device

    def _speed(self, s: int) -> float:
        return self.machine.speed[self.machine.device_of[s]]
