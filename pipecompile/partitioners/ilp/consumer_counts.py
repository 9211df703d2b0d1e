"""Who reads a flow, stage by stage: what windows say beyond every single consumer.

    u ──▶ c1 ── gap ── c2 ── gap ── c3          consumers that come one after another, with little between them
      stage   0   |   1    |   2                no stage fits into a gap, so all from that of c1 to that of c3 read the flow

A dense block is like that: every layer reads all before it. To count each consumer by itself lets a relaxed program put half of c1 and
half of c2 into a stage and pay half of the flow; in truth the stage reads it or not.
"""

from __future__ import annotations

from math import inf

from pipecompile.partitioners.bounds.stage_windows import Windows
from pipecompile.partitioners.clusters import Clusters, Flow
from pipecompile.partitioners.ilp.solver_backend import Linear
from pipecompile.partitioners.ilp.step_variables import Steps

__all__ = ["Readers"]


class Readers:
    """The readers of the flows of some clusters, within windows."""

    def __init__(self, clusters: Clusters, windows: Windows) -> None:
        self.windows = windows
        self._gaps = [_gap(flow, windows) for flow in clusters.flows]

    def terms(self, steps: Steps, number: int, flow: Flow, s: int) -> list[Linear]:
        """Expressions of which any is 1 only if stage s holds a consumer, and one is if it does."""
        terms = [steps.inside(consumer, s) for consumer in flow.consumers if steps.may_be(consumer, s)]
        if self._gaps[number] < self.windows.room(s):
            terms.append(steps.below(flow.consumers[0], s) - steps.below(flow.consumers[-1], s - 1))
        return terms

    def fewest(self, number: int, flow: Flow, s: int) -> int:
        """How many stages after s read the flow at least, when its source is in s."""
        first, last = self.windows.first, self.windows.last
        begin, end = max(int(last[flow.consumers[0]]), s + 1), int(first[flow.consumers[-1]])
        if begin <= end and all(self._gaps[number] < self.windows.room(q) for q in range(begin, end + 1)):
            return end - begin + 1
        count, reached = 0, s
        for low, high in sorted(((int(first[c]), int(last[c])) for c in flow.consumers), key=lambda window: window[1]):
            if low > reached:
                count, reached = count + 1, high
        return count


def _gap(flow: Flow, windows: Windows) -> float:
    """The most work between two consumers that follow each other; infinite when they are not all in a line."""
    pairs = list(zip(flow.consumers, flow.consumers[1:], strict=False))
    if not pairs or windows.reach is None or not all(windows.reach[a, b] for a, b in pairs):
        return inf
    return float(max(windows.total - windows.before[a] - windows.after[b] for a, b in pairs))
