"""What devices hold in memory, and which stages recompute, as rows and variables of the integer program.

    redone(s) = 1          stage s recomputes: a number where the problem says so, else a variable
    excess(s) >= (in_flight - 1) * activation(s)       unless redone: all that s saves, beyond once
    again(s)  >= forward(s)                            if redone: what it computes again

A choice is left to the solver only where it can help: more than one micro-batch in flight, something saved, and a limit.
"""

from __future__ import annotations

from math import isfinite

from pipecompile.partitioners.clusters import Clusters
from pipecompile.partitioners.ilp.solver_backend import Linear
from pipecompile.partitioners.ilp.step_variables import ONE, ZERO, Steps
from pipecompile.partitioners.ilp.traffic_rows import Traffic
from pipecompile.partitioners.machine import Stages

__all__ = ["Holdings"]


class Holdings:
    """Memory of devices in `unit` bytes; what stages recompute, in `scale` seconds. Limits up to `roof` bytes count."""

    def __init__(
        self, steps: Steps, clusters: Clusters, stages: Stages, traffic: Traffic, scale: float, unit: float, roof: float
    ) -> None:
        self.steps, self.clusters, self.stages, self.traffic = steps, clusters, stages, traffic
        self.scale, self.unit, self.roof = scale, unit, roof
        self.members = [[v for v in range(len(clusters)) if steps.may_be(v, s)] for s in range(len(stages))]
        self.redone = [self._redone(s) for s in range(len(stages))]

    def again(self, s: int) -> Linear:
        """The time of the forward of stage s, if it recomputes. (Without that it is part of a load, so at most 1.)"""
        redone = self.redone[s]
        if redone is ZERO:
            return ZERO
        forward = Linear()
        for v in self.members[s]:
            forward.add(self.steps.inside(v, s), self.clusters.forward[v] / self._speed(s) / self.scale)
        if redone is ONE:
            return forward
        most = min(1.0, sum(self.clusters.forward[v] for v in self.members[s]) / self._speed(s) / self.scale)
        return self.steps.mip.positive([forward + redone * most - most])

    def memory(self, device: int) -> Linear:
        """What a device holds."""
        held = Linear()
        for s in self.stages.on(device):
            for v in self.members[s]:
                held.add(self.steps.inside(v, s), (self.clusters.bytes[v] + self.clusters.activation[v]) / self.unit)
            held.add(self._excess(s))
            for number, flow in enumerate(self.clusters.flows):
                if flow.bytes and any(self.steps.may_be(consumer, s) for consumer in flow.consumers):
                    held.add(self.traffic.arrives(number, flow, s), self.stages.in_flight[s] * flow.bytes / self.unit)
        for users, size in self.clusters.shared:
            held.add(self.steps.mip.positive(self._on(user, device) for user in users), size / self.unit)
        return held

    def _redone(self, s: int) -> Linear:
        asked = self.stages.recompute[s]
        if asked is not None:
            return ONE if asked else ZERO
        saved = any(self.clusters.activation[v] for v in self.members[s])
        helps = saved and self.stages.in_flight[s] > 1 and isfinite(self.stages.limit[self.stages.device[s]])
        return self.steps.mip.variable(integer=True) if helps else ZERO

    def _excess(self, s: int) -> Linear:
        """What a stage saves beyond once per node."""
        redone, times = self.redone[s], self.stages.in_flight[s] - 1
        if redone is ONE or not times:
            return ZERO
        saved = Linear()
        for v in self.members[s]:
            saved.add(self.steps.inside(v, s), times * self.clusters.activation[v] / self.unit)
        if redone is ZERO:
            return saved
        most = times * min(sum(self.clusters.activation[v] for v in self.members[s]), self.roof) / self.unit
        return self.steps.mip.positive([saved - redone * most], most)

    def _on(self, cluster: int, device: int) -> Linear:
        at = Linear()
        for s in self.stages.on(device):
            at.add(self.steps.inside(cluster, s))
        return at

    def _speed(self, s: int) -> float:
        return self.stages.speed[self.stages.device[s]]
