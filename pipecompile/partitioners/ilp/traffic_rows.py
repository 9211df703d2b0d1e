"""What flows cost the devices at their ends, as rows and variables of the integer program.

A flow from u to one consumer v needs one variable per stage for all four of its sides, since

    apart(s) >= inside(u, s) - inside(v, s),  apart(s) >= 0        u is in s and v is not
    apart(s) -  inside(u, s) + inside(v, s)                        v is in s and u is not

When it matters who sends to whom, because every receiver is paid for or links differ, there is a variable per pair:

    route(p, q) >= at(u, p) + at(v, q) - 1                         u is on p, and some consumer v on q
    sum of route(p, q) over p >= at(v, q) - at(u, q)               all that q receives is sent by someone
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipecompile.partitioners.clusters import Clusters, Flow
from pipecompile.partitioners.ilp.consumer_counts import Readers
from pipecompile.partitioners.ilp.solver_backend import Linear
from pipecompile.partitioners.ilp.step_variables import ZERO, Steps
from pipecompile.partitioners.machine import Stages

__all__ = ["Traffic"]


class Traffic:
    """What each device sends and receives, in units of `scale`, and which flows each stage receives."""

    def __init__(self, steps: Steps, clusters: Clusters, stages: Stages, readers: Readers, scale: float) -> None:
        self.steps, self.stages, self.readers = steps, stages, readers
        self.sent = [Linear() for _ in stages.speed]
        self.received = [Linear() for _ in stages.speed]
        self._arcs = set(clusters.arcs)
        self._apart: dict[tuple[int, int, int], Linear] = {}
        self._arrives: dict[tuple[int, int], Linear] = {}
        self._at: dict[tuple[int, int], Linear] = {}
        self._on = [stages.on(d) for d in range(len(stages.speed))]
        for number, flow in enumerate(clusters.flows):
            if flow.time:
                self._add(number, flow, flow.time / scale)

    def arrives(self, number: int, flow: Flow, s: int) -> Linear:
        """1 when stage s reads a flow that another stage sends."""
        if (number, s) not in self._arrives:
            self._arrives[number, s] = arrival(self.steps, self.readers, number, flow, s)
        return self._arrives[number, s]

    def _add(self, number: int, flow: Flow, time: float) -> None:
        single = len(flow.consumers) == 1
        if not self.stages.direct or self.stages.links is not None:
            self._add_routes(flow, time)
        elif single:
            self._add_single(number, flow, time)
        elif self.stages.multicast:
            self._add_multicast(number, flow, time)
        else:
            self._add_copies(number, flow, time)

    def _add_single(self, number: int, flow: Flow, time: float) -> None:
        """One consumer. A value and its gradient, which goes the other way, share their variables."""
        for s in self._stages_of((flow.source, *flow.consumers)):
            low, high = sorted((flow.source, flow.consumers[0]))
            difference = self.steps.inside(low, s) - self.steps.inside(high, s)
            if (low, high, s) not in self._apart:
                self._apart[low, high, s] = self.steps.mip.positive([difference])
            apart = self._apart[low, high, s]
            leaves, enters = (apart, apart - difference) if flow.source == low else (apart - difference, apart)
            self.sent[s].add(leaves, time)
            self.received[s].add(enters, time)
            self._arrives[number, s] = enters

    def _add_multicast(self, number: int, flow: Flow, time: float) -> None:
        """Several consumers, sent once: a variable for sending and one for receiving, per stage."""
        for s in self._stages_of([flow.source]):
            self.sent[s].add(departure(self.steps, flow, s), time)
        for s in self._stages_of(flow.consumers):
            self.received[s].add(self.arrives(number, flow, s), time)

    def _add_copies(self, number: int, flow: Flow, time: float) -> None:
        """Several consumers, sent to each stage. A consumer that depends on the source is never in a stage before it."""
        steps, ordered = self.steps, all((flow.source, consumer) in self._arcs for consumer in flow.consumers)
        for q in self._stages_of(flow.consumers):
            here = steps.inside(flow.source, q)
            readers = self.readers.terms(steps, number, flow, q)
            senders = [p for p in self._stages_of([flow.source]) if (p < q if ordered else p != q)]
            routes = {p: self._route(steps.inside(flow.source, p), readers) for p in senders}
            total = Linear()
            for p, route in routes.items():
                self.sent[p].add(route, time)
                total.add(route)
            for reader in readers:
                steps.mip.require(total, reader - here)
            self.received[q].add(total, time)
            self._arrives[number, q] = total

    def _add_routes(self, flow: Flow, time: float) -> None:
        """Between devices, at the price of their link."""
        devices = range(len(self.stages.speed))
        sent: dict[int, list[Linear]] = {p: [] for p in devices}
        for q in devices:
            here = self._located(flow.source, q)
            readers = [at for consumer in flow.consumers if not _nowhere(at := self._located(consumer, q))]
            total = Linear()
            for p in devices if readers else ():
                if p != q and not _nowhere(source := self._located(flow.source, p)):
                    route = self._route(source, readers)
                    price = self.stages.factor(p, q) * time
                    total.add(route)
                    self.received[q].add(route, price)
                    sent[p].append(route * price)
            for reader in readers:
                self.steps.mip.require(total, reader - here)
        for p, prices in sent.items():
            if self.stages.multicast and len(flow.consumers) > 1:
                dearest = max((price.constant + sum(price.terms.values()) for price in prices), default=0.0)
                self.sent[p].add(self.steps.mip.positive(prices, dearest))
            else:
                for each in prices:
                    self.sent[p].add(each)

    def _route(self, source: Linear, readers: Iterable[Linear]) -> Linear:
        """At least 1 when the source is at one end and a reader at the other, at most 1 when the source is there."""
        route = self.steps.mip.positive(source + reader - 1.0 for reader in readers)
        self.steps.mip.require(source, route)
        return route

    def _located(self, cluster: int, device: int) -> Linear:
        """1 when the cluster is on the device."""
        if (cluster, device) not in self._at:
            at = Linear()
            for s in self._on[device]:
                at.add(self.steps.inside(cluster, s))
            self._at[cluster, device] = at
        return self._at[cluster, device]

    def _stages_of(self, clusters: Sequence[int]) -> range:
        first, last = self.steps.first, self.steps.last
        return range(min(first[v] for v in clusters), max(last[v] for v in clusters) + 1)


def departure(steps: Steps, flow: Flow, s: int, copies: int = 1) -> Linear:
    """At least 1 when stage s makes a flow and another stage reads it; at least so many copies when it makes it."""
    here = steps.inside(flow.source, s)
    terms = [here - steps.inside(consumer, s) for consumer in flow.consumers]
    return steps.mip.positive([*terms, here * copies] if copies > 1 else terms, max(copies, 1))


def arrival(steps: Steps, readers: Readers, number: int, flow: Flow, s: int) -> Linear:
    """At least 1 when stage s reads a flow that another stage makes."""
    here = steps.inside(flow.source, s)
    return steps.mip.positive(reader - here for reader in readers.terms(steps, number, flow, s))


def _nowhere(at: Linear) -> bool:
    return at is ZERO or (not at.terms and not at.constant)
