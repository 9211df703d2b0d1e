"""Cuts of linear orders with a short step: each boundary slides to where the estimate of `step_objective.py` is least.

    order   a b c d e f g h          a cut with the least largest load, where transfers occupy links and not devices,
            a b | c d e | f g h      or where they take no time
            a b c d | e | f g h      the first boundary slides, and pushes others where it meets them

The least bottleneck counts a transfer as work of both devices. Where transfers are slow it leaves devices empty, though a
pipeline sends while it computes: moves of single clusters do not find the way from there to a cut that uses all devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from pipecompile.partitioners.clusters import BLOCK
from pipecompile.partitioners.constraints import StageRanges
from pipecompile.partitioners.dp.chain_partition import cut_order
from pipecompile.partitioners.dp.strategy import candidate_orders
from pipecompile.partitioners.stage_paths import is_legal
from pipecompile.partitioners.step_objective import StepObjective

__all__ = ["least_work", "sliding_cuts"]

_ORDERS = 6
"""Linear orders that are cut."""

_WORK = 200_000
"""Effort of all slides: some tenths of a second."""

_POSITIONS = 24
"""About how many positions of a boundary are tried before the finer ones."""


def least_work(objective: StepObjective, ranges: StageRanges | None) -> float:
    """Return the seconds of the slowest stage of a cut that balances the work alone, of one linear order."""
    silent = replace(objective.clusters, flows=())
    order = next(candidate_orders(silent, ranges))
    cut = cut_order(silent, objective.machine, order, ranges)
    return float("inf") if cut is None else max(objective.work(cut))


def sliding_cuts(objective: StepObjective, ranges: StageRanges | None, most: int) -> list[list[int]]:
    """Return up to `most` cuts, the shortest estimated step first; none where no transfer takes time."""
    clusters = objective.clusters
    if not any(flow.time for flow in clusters.flows) or len(clusters) > BLOCK:
        return []
    starts = [_Sliding(objective, ranges, order, cut) for order, cut in _ordered_cuts(objective, ranges)]
    share = _WORK // objective.effort // max(1, len(starts))
    found = {tuple(each.cut_after(share)): each.seconds for each in starts}
    return [list(cut) for cut in sorted(found, key=lambda cut: (found[cut], cut))[:most]]


def _ordered_cuts(objective: StepObjective, ranges: StageRanges | None) -> Iterator[tuple[list[int], list[int]]]:
    """Yield linear orders with a legal cut of each: transfers beside the work, or free."""
    clusters, machine = objective.clusters, replace(objective.machine, overlap=True)
    for order in islice(candidate_orders(clusters, ranges), _ORDERS):
        for graph in (clusters, replace(clusters, flows=())):
            cut = cut_order(graph, machine, order, ranges)
            if cut is not None and is_legal(clusters, ranges, cut):
                yield order, cut


@dataclass(slots=True)
class _Sliding:
    """A cut of a linear order as the positions of its boundaries. The cut does not decrease along the order."""

    objective: StepObjective
    ranges: StageRanges | None
    order: list[int]
    cut: list[int]
    seconds: float = 0.0

    def cut_after(self, evaluations: int) -> list[int]:
        """Return the cut after slides that shorten the step, of which at most `evaluations` are tried."""
        self.seconds = self.objective.score(self.cut)[0]
        ends = self._ends()
        stride = max(1, len(self.order) // _POSITIONS)
        while evaluations > 0:
            before = self.seconds
            for boundary in range(len(ends)):
                for moved in islice(self._slides(ends, boundary, stride), max(0, evaluations)):
                    evaluations -= 1
                    ends = self._better(ends, moved)
            if self.seconds == before:
                if stride == 1:
                    break
                stride = max(1, stride // 3)
        return self.cut

    def _ends(self) -> list[int]:
        """Return where in the order each stage but the last ends."""
        counts = [0] * len(self.objective.placement)
        for stage in self.cut:
            counts[stage] += 1
        return [sum(counts[: stage + 1]) for stage in range(len(counts) - 1)]

    def _slides(self, ends: Sequence[int], boundary: int, stride: int) -> Iterator[list[int]]:
        """Yield the boundaries after one of them slid by multiples of `stride`, nearest first."""
        n = len(self.order)
        steps = (sign * far for far in range(stride, min(n, _POSITIONS * stride) + 1, stride) for sign in (1, -1))
        for position in (ends[boundary] + step for step in steps):
            if 0 <= position <= n:
                yield [
                    min(end, position) if s < boundary else max(end, position) if s > boundary else position
                    for s, end in enumerate(ends)
                ]

    def _better(self, ends: list[int], moved: list[int]) -> list[int]:
        """Return the boundaries with the shorter step, and keep its cut."""
        cut, begin = [0] * len(self.order), 0
        for stage, end in enumerate([*moved, len(self.order)]):
            for position in range(begin, end):
                cut[self.order[position]] = stage
            begin = end
        seconds = self.objective.score(cut, self.seconds)[0]
        if seconds >= self.seconds or not is_legal(self.objective.clusters, self.ranges, cut):
            return ends
        self.cut, self.seconds = cut, seconds
        return moved
