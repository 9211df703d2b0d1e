"""What a flow costs the stages at its ends, as rows and variables of the integer program.

A flow from u to one consumer v needs one variable per stage for all four of its sides, since

    apart(s) >= inside(u, s) - inside(v, s),  apart(s) >= 0        u is in s and v is not
    apart(s) -  inside(u, s) + inside(v, s)                        v is in s and u is not
"""

from __future__ import annotations

from itertools import count

import pulp

from pipecompile.partitioners.clusters import Flow, Stages
from pipecompile.partitioners.steps import Steps, Term

__all__ = ["Traffic"]


class Traffic:
    """What each stage sends and receives, as lists of terms that grow with every flow."""

    def __init__(self, made: Steps, stages: Stages) -> None:
        self.made, self.stages = made, stages
        self.sent: list[list[Term]] = [[] for _ in range(len(stages))]
        self.received: list[list[Term]] = [[] for _ in range(len(stages))]
        self._apart: dict[tuple[int, int, int], Term] = {}
        self._number = count()

    def add(self, flow: Flow, time: float) -> None:
        """Charge a flow, at so much per crossing, to the stages at both of its ends."""
        (self._add_single if len(flow.consumers) == 1 else self._add_many)(flow, time)

    def _add_single(self, flow: Flow, time: float) -> None:
        """One consumer. A value and its gradient, which goes the other way, share their variables."""
        low, high = sorted((flow.source, flow.consumers[0]))
        for s in range(len(self.stages)):
            difference = self.made.inside(low, s) - self.made.inside(high, s)
            if (low, high, s) not in self._apart:
                self._apart[low, high, s] = self.made.positive(f"apart_{low}_{high}_{s}", [difference])
            apart = self._apart[low, high, s]
            leaves, enters = (apart, apart - difference) if flow.source == low else (apart - difference, apart)
            self.sent[s].append(time * leaves)
            self.received[s].append(time * enters)

    def _add_many(self, flow: Flow, time: float) -> None:
        """Several consumers: a variable for sending and one for receiving, per stage. Without multicast the sender pays
        the number of receiving stages, which it learns from the receivers.
        """
        number, sent, received, source = next(self._number), [], [], []
        most = 1 if self.stages.multicast else min(len(flow.consumers), len(self.stages) - 1)
        for s in range(len(self.stages)):
            source.append(self.made.inside(flow.source, s))
            apart = [source[s] - self.made.inside(consumer, s) for consumer in flow.consumers]
            sent.append(self.made.positive(f"sent_{number}_{s}", apart, most))
            received.append(self.made.positive(f"received_{number}_{s}", [-difference for difference in apart]))
            self.sent[s].append(time * sent[s])
            self.received[s].append(time * received[s])
        if not self.stages.multicast:
            for s in range(len(self.stages)):
                self.made.require(sent[s], pulp.lpSum(received) - most * (1 - source[s]))
            self.made.require(pulp.lpSum(sent), pulp.lpSum(received))
