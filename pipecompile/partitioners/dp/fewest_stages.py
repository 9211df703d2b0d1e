"""The fewest stages within a target, where all stages are alike: a shortest path over down-sets, with labels.

    {} ──▶ J ──▶ I ──▶ ... ──▶ all        each arc is a candidate stage; the path with the fewest arcs has the fewest stages

Without labels a sender pays for each tensor once: the fewest stages are then a lower bound, and a target that needs more than there
are is refuted. With labels the count is exact. A *label* is a choice of the stages from a down-set to the end. What it did matters
to the stages before in three ways: how many stages it has, how many of them receive each tensor produced before (its copies), and
the seconds of side branches that it shed and of loose clusters that it left (its debt, `side_branches.py`, `loose_clusters.py`). A
label is dropped if another of the same down-set is nowhere worse. Desrochers and Soumis, "A generalized permanent labelling
algorithm for the shortest path problem with time windows", 1988.
"""

from __future__ import annotations

from math import inf
from time import monotonic

import numpy as np

from pipecompile.partitioners.dp.side_branches import JoinedBranches
from pipecompile.partitioners.dp.stage_candidates import NEVER, Ints, StageCandidates
from pipecompile.partitioners.dp.stage_labels import LabelTable, StageLabels, undominated
from pipecompile.partitioners.objective import TOLERANCE

__all__ = ["FewestStages"]

MAX_EXTENSIONS = 3_000_000
"""Stages that are put before labels for one target: some seconds."""


class FewestStages:
    """Decides whether a number of stages is enough for a target.

    `loose` are the seconds of work that any stage can do. Without `sheds` no side branch is shed and relays send to all: then paths
    are cuts. With `multicast` a sender pays for each tensor once. With `most_labels`, down-sets keep at most `most_labels` labels, and paths
    are missed. `is_complete` tells whether the last search for labels came to its end.
    """

    def __init__(
        self, branches: JoinedBranches, candidates: StageCandidates, n_stages: int, loose: float,
        *, sheds: bool, multicast: bool, most_labels: int | None = None,
    ) -> None:  # fmt: skip
        clusters, self.ratio, self.loose = branches.clusters, branches.ratio, loose
        self.candidates, self.n_stages, self.most_labels = candidates, n_stages, most_labels
        self.relief = candidates.table.relief * sheds
        once = branches.relays if sheds else frozenset()
        several = [
            f
            for f, flow in enumerate(clusters.flows)
            if len(flow.consumers) > 1 and flow.time and not multicast and flow.source not in once
        ]
        self.time = np.array([clusters.flows[f].time for f in several])
        self.has_source, self.n_inside = candidates.has_source[:, several], candidates.n_inside[:, several]
        self.least_load = candidates.load - (self.relief[candidates.after] - self.relief[candidates.before])
        self.is_complete = True

    def is_refuted(self, target: float) -> bool:
        """Return whether more stages are needed even where each tensor is paid for once."""
        return bool(self._stages_before(self._within(target))[-1] > self.n_stages)

    def path(self, target: float, deadline: float = inf) -> list[int] | None:
        """Return the boundaries of a cut within the target, as down-sets; None if there is none, or none was found."""
        kept, self.is_complete = self._within(target), True
        before, after = self.candidates.before[kept], self.candidates.after[kept]
        from_begin = self._stages_before(kept)
        kept = kept[from_begin[before] + 1 + self._stages_after(kept)[after] <= self.n_stages]
        return self._boundaries(kept, from_begin, target, deadline)

    def _within(self, target: float) -> Ints:
        """Return the candidates with a load within the target."""
        return np.flatnonzero(self.least_load <= target * (1 + TOLERANCE))

    def _starts(self, kept: Ints) -> Ints:
        """Return where the candidates that end at each down-set begin among those kept."""
        return np.searchsorted(self.candidates.after[kept], np.arange(len(self.candidates.table) + 1))

    def _stages_before(self, kept: Ints) -> Ints:
        """Return, per down-set, the fewest stages that make it."""
        before, starts = self.candidates.before[kept], self._starts(kept)
        fewest = np.full(len(starts) - 1, NEVER, dtype=np.int64)
        fewest[0] = 0
        for i in np.unique(self.candidates.after[kept]):
            fewest[i] = min(NEVER, fewest[before[starts[i] : starts[i + 1]]].min() + 1)
        return fewest

    def _stages_after(self, kept: Ints) -> Ints:
        """Return, per down-set, the fewest stages that make the rest."""
        before, starts = self.candidates.before[kept], self._starts(kept)
        fewest = np.full(len(starts) - 1, NEVER, dtype=np.int64)
        fewest[-1] = 0
        for i in np.unique(self.candidates.after[kept])[::-1]:
            sources = before[starts[i] : starts[i + 1]]
            fewest[sources] = np.minimum(fewest[sources], fewest[i] + 1)
        return fewest

    # -- labels -------------------------------------------------------------------------------------------------------

    def _boundaries(self, kept: Ints, from_begin: Ints, target: float, deadline: float) -> list[int] | None:
        """Return the boundaries of the path with the fewest stages."""
        stages = kept[np.lexsort((-self.candidates.after[kept], self.candidates.before[kept]))]
        starts = np.searchsorted(self.candidates.before[stages], np.arange(len(from_begin) + 1))
        table = LabelTable(len(from_begin), StageLabels.of_end(self.loose, len(self.time)))
        limit, extended = target * (1 + TOLERANCE), 0
        for j in reversed(range(len(from_begin) - 1)):
            own = stages[starts[j] : starts[j + 1]]
            extended += int(table.count[self.candidates.after[own]].sum())
            if extended > MAX_EXTENSIONS or monotonic() > deadline:
                self.is_complete = False
                return None
            labels = self._extended(j, own, int(from_begin[j]), limit, table)
            if len(labels):
                table.add(j, labels.take(undominated(labels, self.most_labels)))
        first = slice(table.first[0], table.first[0] + table.count[0])
        return table.trace(int(table.first[0] + np.argmin(table.labels.n_stages[first]))) if table.count[0] else None

    def _extended(self, j: int, stages: Ints, n_before: int, limit: float, table: LabelTable) -> StageLabels:
        """Return the labels of down-set j: each of the stages that begin there, before the labels of where it ends. `n_before` is the
        fewest stages that make j.
        """
        ends = self.candidates.after[stages]
        rows, places = table.rows_of(ends)
        labels, ends = table.labels, ends[places]
        again = self.time * np.maximum(labels.copies[rows] - 1, 0)
        slack = limit - self.candidates.load[stages][places] - again @ ~self.has_source[j]
        debt = np.maximum(labels.debt[rows] + np.where(slack < 0, -self.ratio, -1.0) * slack, 0.0)
        n_left = self.n_stages - labels.n_stages[rows] - 1
        fits = (slack + self.relief[ends] - self.relief[j] >= 0) & (n_before <= n_left)
        fits &= self.candidates.table.work[j] + debt <= limit * n_left
        rows, ends = rows[fits], ends[fits]
        receives = self.n_inside[ends] > self.n_inside[j]
        copies = np.where(self.has_source[j], labels.copies[rows] + receives, 0).astype(np.int16)
        return StageLabels(labels.n_stages[rows] + 1, debt[fits], copies, rows)
