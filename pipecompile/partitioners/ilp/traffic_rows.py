"""Cost of flows for the devices at their ends, as rows and variables of the integer program.

A flow from u to one consumer v needs one variable per stage for both directions at both ends, since

    apart(s) >= in_stage(u, s) - in_stage(v, s),  apart(s) >= 0        u is in s and v is not
    apart(s) -  in_stage(u, s) + in_stage(v, s)                        v is in s and u is not

If the cost depends on sender and receiver together, because every receiver is paid for or links differ, there is a variable
per pair of devices:

    route(p, q) >= on_device(u, p) + on_device(v, q) - 1               u is on p, and some consumer v on q
    sum of route(p, q) over p >= on_device(v, q) - on_device(u, q)     some device sends all that q receives
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipecompile.partitioners.clusters import Clusters, Flow
from pipecompile.partitioners.ilp.consumer_counts import ConsumerCounts
from pipecompile.partitioners.ilp.solver_backend import LinearExpr
from pipecompile.partitioners.ilp.step_variables import ZERO, StepVariables
from pipecompile.partitioners.machine import Machine

__all__ = ["TrafficRows", "add_receive_variable", "add_send_variable"]


class TrafficRows:
    """Expressions for the time that each device sends and receives, in `scale` seconds, and the flows that stages receive."""

    def __init__(
        self, steps: StepVariables, clusters: Clusters, machine: Machine, counts: ConsumerCounts, scale: float
    ) -> None:
        self.steps, self.machine, self.counts = steps, machine, counts
        self.sent = [LinearExpr() for _ in machine.speed]
        self.received = [LinearExpr() for _ in machine.speed]
        self._arcs = set(clusters.arcs)
        self._apart: dict[tuple[int, int, int], LinearExpr] = {}
        self._receives: dict[tuple[int, int], LinearExpr] = {}
        self._device_memberships: dict[tuple[int, int], LinearExpr] = {}
        self._stages_on = machine.stages_by_device()
        for number, flow in enumerate(clusters.flows):
            if flow.time:
                self._add_flow(number, flow, flow.time / scale)

    def receives(self, number: int, flow: Flow, s: int) -> LinearExpr:
        """Return 1 iff stage s consumes a flow from another stage."""
        if (number, s) not in self._receives:
            self._receives[number, s] = add_receive_variable(self.steps, self.counts, number, flow, s)
        return self._receives[number, s]

    def _add_flow(self, number: int, flow: Flow, time: float) -> None:
        has_one_consumer = len(flow.consumers) == 1
        if not self.machine.is_one_to_one or self.machine.links is not None:
            self._add_device_routes(flow, time)
        elif has_one_consumer:
            self._add_single_consumer(number, flow, time)
        elif self.machine.multicast:
            self._add_multicast(number, flow, time)
        else:
            self._add_unicast(number, flow, time)

    def _add_single_consumer(self, number: int, flow: Flow, time: float) -> None:
        """Add a flow with one consumer. A value and its gradient, of opposite directions, share their variables."""
        for s in self._stages_of((flow.source, *flow.consumers)):
            low, high = sorted((flow.source, flow.consumers[0]))
            difference = self.steps.in_stage(low, s) - self.steps.in_stage(high, s)
            if (low, high, s) not in self._apart:
                self._apart[low, high, s] = self.steps.mip.add_maximum([difference])
            apart = self._apart[low, high, s]
            sends, receives = (apart, apart - difference) if flow.source == low else (apart - difference, apart)
            self.sent[s].add(sends, time)
            self.received[s].add(receives, time)
            self._receives[number, s] = receives

    def _add_multicast(self, number: int, flow: Flow, time: float) -> None:
        """Add a flow that is sent once: per stage, one variable for sending and one for receiving."""
        for s in self._stages_of([flow.source]):
            self.sent[s].add(add_send_variable(self.steps, flow, s), time)
        for s in self._stages_of(flow.consumers):
            self.received[s].add(self.receives(number, flow, s), time)

    def _add_unicast(self, number: int, flow: Flow, time: float) -> None:
        """Add a flow that is sent to each consuming stage. Descendants of the source are never in a stage before it."""
        steps, is_forward = self.steps, all((flow.source, consumer) in self._arcs for consumer in flow.consumers)
        for q in self._stages_of(flow.consumers):
            here = steps.in_stage(flow.source, q)
            consumers = self.counts.terms(steps, number, flow, q)
            senders = [p for p in self._stages_of([flow.source]) if (p < q if is_forward else p != q)]
            routes = {p: self._add_route(steps.in_stage(flow.source, p), consumers) for p in senders}
            total = LinearExpr()
            for p, route in routes.items():
                self.sent[p].add(route, time)
                total.add(route)
            for consumer in consumers:
                steps.mip.add_row(total, consumer - here)
            self.received[q].add(total, time)
            self._receives[number, q] = total

    def _add_device_routes(self, flow: Flow, time: float) -> None:
        """Add a flow between devices, at the factor of their link."""
        devices = range(len(self.machine.speed))
        sent: dict[int, list[LinearExpr]] = {p: [] for p in devices}
        for q in devices:
            here = self._on_device(flow.source, q)
            consumers = [on_q for consumer in flow.consumers if not _is_zero(on_q := self._on_device(consumer, q))]
            total = LinearExpr()
            for p in devices if consumers else ():
                if p != q and not _is_zero(source := self._on_device(flow.source, p)):
                    route = self._add_route(source, consumers)
                    link_time = self.machine.link_factor(p, q) * time
                    total.add(route)
                    self.received[q].add(route, link_time)
                    sent[p].append(route * link_time)
            for consumer in consumers:
                self.steps.mip.add_row(total, consumer - here)
        for p, times in sent.items():
            if self.machine.multicast and len(flow.consumers) > 1:
                most = max((term.constant + sum(term.terms.values()) for term in times), default=0.0)
                self.sent[p].add(self.steps.mip.add_maximum(times, most))
            else:
                for term in times:
                    self.sent[p].add(term)

    def _add_route(self, source: LinearExpr, consumers: Iterable[LinearExpr]) -> LinearExpr:
        """Return a variable: at least 1 if source and some consumer are at its ends, at most 1 if the source is."""
        route = self.steps.mip.add_maximum(source + consumer - 1.0 for consumer in consumers)
        self.steps.mip.add_row(source, route)
        return route

    def _on_device(self, cluster: int, device: int) -> LinearExpr:
        """Return 1 iff the cluster is on the device."""
        if (cluster, device) not in self._device_memberships:
            membership = LinearExpr()
            for s in self._stages_on[device]:
                membership.add(self.steps.in_stage(cluster, s))
            self._device_memberships[cluster, device] = membership
        return self._device_memberships[cluster, device]

    def _stages_of(self, clusters: Sequence[int]) -> range:
        earliest, latest = self.steps.earliest, self.steps.latest
        return range(min(earliest[v] for v in clusters), max(latest[v] for v in clusters) + 1)


def add_send_variable(steps: StepVariables, flow: Flow, s: int, copies: int = 1) -> LinearExpr:
    """Return a variable: at least 1 if stage s produces a flow that another stage consumes; at least `copies` if s produces it."""
    here = steps.in_stage(flow.source, s)
    terms = [here - steps.in_stage(consumer, s) for consumer in flow.consumers]
    return steps.mip.add_maximum([*terms, here * copies] if copies > 1 else terms, max(copies, 1))


def add_receive_variable(steps: StepVariables, counts: ConsumerCounts, number: int, flow: Flow, s: int) -> LinearExpr:
    """Return a variable: at least 1 if stage s consumes a flow that another stage produces."""
    here = steps.in_stage(flow.source, s)
    return steps.mip.add_maximum(consumer - here for consumer in counts.terms(steps, number, flow, s))


def _is_zero(expr: LinearExpr) -> bool:
    return expr is ZERO or (not expr.terms and not expr.constant)
