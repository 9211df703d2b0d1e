"""Bounds on the stages that consume a flow, from the windows of its consumers together.

    u ──▶ c1 ── gap ── c2 ── gap ── c3          consumers that come one after another, with little work between them
      stage   0   |   1    |   2                no stage fits into a gap, so all from that of c1 to that of c3 consume the flow

A dense block is such a graph: every layer consumes all layers before it. Counting each consumer by itself lets the relaxation
put half of c1 and half of c2 into a stage and pay half of the flow, although the stage consumes the flow or does not.
"""

from __future__ import annotations

from math import inf

from pipecompile.partitioners.bounds.stage_windows import StageWindows
from pipecompile.partitioners.clusters import Clusters, Flow
from pipecompile.partitioners.ilp.solver_backend import LinearExpr
from pipecompile.partitioners.ilp.step_variables import StepVariables

__all__ = ["ConsumerCounts"]


class ConsumerCounts:
    """The consumers of flows, within windows."""

    def __init__(self, clusters: Clusters, windows: StageWindows) -> None:
        self.windows = windows
        self._gaps = [_max_gap(flow, windows) for flow in clusters.flows]

    def terms(self, steps: StepVariables, number: int, flow: Flow, s: int) -> list[LinearExpr]:
        """Return expressions whose maximum is 1 iff stage s holds a consumer of the flow."""
        terms = [steps.in_stage(consumer, s) for consumer in flow.consumers if steps.is_possible(consumer, s)]
        if self._gaps[number] < self.windows.min_stage_work(s):
            terms.append(steps.at_most(flow.consumers[0], s) - steps.at_most(flow.consumers[-1], s - 1))
        return terms

    def min_stages_after(self, number: int, flow: Flow, s: int) -> int:
        """Return a lower bound of the number of stages after s that consume the flow, if its source is in s.

        Without a chain of consumers, it is the size of a greedy set of disjoint windows.
        """
        earliest, latest, windows = self.windows.earliest, self.windows.latest, self.windows
        begin, end = max(int(latest[flow.consumers[0]]), s + 1), int(earliest[flow.consumers[-1]])
        if begin <= end and all(self._gaps[number] < windows.min_stage_work(q) for q in range(begin, end + 1)):
            return end - begin + 1
        count, reached = 0, s
        ranges = ((int(earliest[c]), int(latest[c])) for c in flow.consumers)
        for low, high in sorted(ranges, key=lambda window: window[1]):
            if low > reached:
                count, reached = count + 1, high
        return count


def _max_gap(flow: Flow, windows: StageWindows) -> float:
    """Return the most work between consecutive consumers; infinite if the consumers are not a chain of the precedence."""
    pairs = list(zip(flow.consumers, flow.consumers[1:], strict=False))
    if not pairs or windows.closure is None or not all(windows.closure[a, b] for a, b in pairs):
        return inf
    return float(max(windows.total_work - windows.head_work[a] - windows.tail_work[b] for a, b in pairs))
