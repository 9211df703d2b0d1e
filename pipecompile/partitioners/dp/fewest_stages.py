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

from dataclasses import dataclass
from math import inf
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from pipecompile.partitioners.dp.side_branches import JoinedBranches
from pipecompile.partitioners.dp.stage_candidates import NEVER, Floats, Ints, StageCandidates
from pipecompile.partitioners.objective import TOLERANCE

__all__ = ["FewestStages"]

Counts = NDArray[np.int16]

MAX_EXTENSIONS = 3_000_000
"""Stages that are put before labels for one target: some seconds."""


@dataclass(frozen=True, slots=True)
class _Label:
    """Stages from a down-set to the end; `rest` is the label of the down-set after the first of them."""

    down_set: int
    n_stages: int
    debt: float
    copies: Counts
    rest: _Label | None

    def dominates(self, other: _Label) -> bool:
        no_worse = self.n_stages <= other.n_stages and self.debt <= other.debt
        return no_worse and bool((self.copies <= other.copies).all())


class FewestStages:
    """Decides whether a number of stages is enough for a target.

    `loose` are the seconds of work that any stage can do. Without `sheds` no side branch is shed and relays send to all: then paths
    are cuts. With `multicast` a sender pays for each tensor once. `is_complete` tells whether the last search for labels came to
    its end.
    """

    def __init__(
        self, branches: JoinedBranches, candidates: StageCandidates, n_stages: int, loose: float,
        *, sheds: bool, multicast: bool,
    ) -> None:  # fmt: skip
        clusters, self.ratio, self.loose = branches.clusters, branches.ratio, loose
        self.candidates, self.n_stages = candidates, n_stages
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
        label = self._first_label(kept, from_begin, target, deadline)
        boundaries = []
        while label is not None:
            boundaries.append(label.down_set)
            label = label.rest
        return boundaries or None

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

    def _first_label(self, kept: Ints, from_begin: Ints, target: float, deadline: float) -> _Label | None:
        """Return the label of the empty down-set with the fewest stages."""
        n, limit, starts, extended = len(from_begin), target * (1 + TOLERANCE), self._starts(kept), 0
        labels: list[list[_Label]] = [[] for _ in range(n)]
        labels[-1].append(_Label(n - 1, 0, self.loose, np.zeros(len(self.time), dtype=np.int16), None))
        for i in reversed(range(1, n)):
            stages = kept[starts[i] : starts[i + 1]]
            for label in labels[i]:
                extended += len(stages)
                self._extend(label, stages, from_begin, limit, labels)
            if extended > MAX_EXTENSIONS or monotonic() > deadline:
                self.is_complete = False
                return None
        return min(labels[0], key=lambda label: label.n_stages, default=None)

    def _extend(self, label: _Label, stages: Ints, from_begin: Ints, limit: float, labels: list[list[_Label]]) -> None:
        """Put each of the stages that end where a label starts before it."""
        before = self.candidates.before[stages]
        slack = limit - self.candidates.load[stages] - self._sent_again(label, before)
        debt = np.maximum(label.debt + np.where(slack < 0, -self.ratio, -1.0) * slack, 0.0)
        n_left = self.n_stages - label.n_stages - 1
        fits = (slack + self.relief[label.down_set] - self.relief[before] >= 0) & (from_begin[before] <= n_left)
        fits &= self.candidates.table.work[before] + debt <= limit * n_left
        for j, owed in zip(before[fits].tolist(), debt[fits].tolist(), strict=True):
            receives = self.n_inside[label.down_set] > self.n_inside[j]
            copies = np.where(self.has_source[j], label.copies + receives, 0).astype(np.int16)
            _insert(labels[j], _Label(j, label.n_stages + 1, owed, copies, label))

    def _sent_again(self, label: _Label, before: Ints) -> Floats:
        """Return the seconds that stages from `before` send to the second and later receivers of their tensors."""
        again = self.time * np.maximum(label.copies - 1, 0)
        flows = np.flatnonzero(again)
        seconds: Floats = ~self.has_source[np.ix_(before, flows)] @ again[flows]
        return seconds


def _insert(labels: list[_Label], label: _Label) -> None:
    """Add a label unless another dominates it; drop those that it dominates."""
    if any(other.dominates(label) for other in labels):
        return
    labels[:] = [other for other in labels if not label.dominates(other)]
    labels.append(label)
