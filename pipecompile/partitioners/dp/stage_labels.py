"""Labels in arrays: choices of the stages from a down-set to the end, a row each, those of one down-set side by side.

    row   down-set   stages   debt   copies of each tensor   rest (row)
    0     all        0        0.0    0 0                     -1
    1     21         1        0.0    0 0                      0
    2     17         2        0.0    1 0                      1
    3     17         3        0.0    0 0                      1           fewer copies than row 2: kept

All labels of a down-set are known when it is reached, so they are compared once, in numpy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["LabelTable", "StageLabels", "undominated"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Counts = NDArray[np.int16]

_BLOCK = 256
"""Labels that are compared with each other at once."""

_CHOICE = 4
"""Labels that are compared for each that is kept, where there is a most of them."""


@dataclass(frozen=True, slots=True)
class StageLabels:
    """Labels, a row each. `rest` is the row in the table of the label behind the first stage."""

    n_stages: Ints
    debt: Floats
    copies: Counts
    rest: Ints

    @classmethod
    def of_end(cls, debt: float, n_tensors: int) -> StageLabels:
        """Return the label of the down-set of all, which has no stage."""
        copies = np.zeros((1, n_tensors), dtype=np.int16)
        return cls(np.zeros(1, dtype=np.int64), np.array([debt]), copies, np.full(1, -1))

    def __len__(self) -> int:
        return len(self.n_stages)

    def take(self, rows: Ints) -> StageLabels:
        """Return some of the labels."""
        return StageLabels(self.n_stages[rows], self.debt[rows], self.copies[rows], self.rest[rows])

    def longer(self, length: int) -> StageLabels:
        """Return the labels with room for `length` rows."""
        more = length - len(self)
        copies = np.pad(self.copies, ((0, more), (0, 0)))
        return StageLabels(
            np.pad(self.n_stages, (0, more)), np.pad(self.debt, (0, more)), copies, np.pad(self.rest, (0, more))
        )

    def put(self, start: int, labels: StageLabels) -> None:
        """Write labels over the rows from `start` on."""
        rows = slice(start, start + len(labels))
        self.n_stages[rows], self.debt[rows] = labels.n_stages, labels.debt
        self.copies[rows], self.rest[rows] = labels.copies, labels.rest


class LabelTable:
    """The labels of all down-sets that were reached: those of down-set i are the rows from `first[i]`, `count[i]` of them.

    `labels` has room for more rows than are there, and is twice as long whenever it is full.
    """

    def __init__(self, n_down_sets: int, labels: StageLabels) -> None:
        self.first, self.count = np.zeros(n_down_sets, dtype=np.int64), np.zeros(n_down_sets, dtype=np.int64)
        self.labels, self._length = labels.take(np.arange(0)), 0
        self._down_sets = list[int]()
        self.add(n_down_sets - 1, labels)

    def add(self, down_set: int, labels: StageLabels) -> None:
        """Add the labels of a down-set."""
        self.first[down_set], self.count[down_set] = self._length, len(labels)
        end = self._length + len(labels)
        if end > len(self.labels):
            self.labels = self.labels.longer(2 * end)
        self.labels.put(self._length, labels)
        self._down_sets += [down_set] * len(labels)
        self._length = end

    def rows_of(self, down_sets: Ints) -> tuple[Ints, Ints]:
        """Return the rows of several down-sets one after the other, and for each the place of its down-set among them."""
        counts = self.count[down_sets]
        places = np.repeat(np.arange(len(down_sets)), counts)
        begins = np.cumsum(counts) - counts
        return (self.first[down_sets] - begins)[places] + np.arange(len(places)), places

    def trace(self, row: int) -> list[int]:
        """Return the down-sets along the path of a label."""
        down_sets = []
        while row >= 0:
            down_sets.append(self._down_sets[row])
            row = int(self.labels.rest[row])
        return down_sets


def undominated(labels: StageLabels, most: int | None = None) -> Ints:
    """Return the rows that no other row dominates, of equal ones the first; with `most`, at most `most` of the best. What dominates a
    row comes before it in the order of sums.
    """
    order = np.lexsort((labels.copies.sum(axis=1), labels.debt, labels.n_stages))
    values = np.column_stack([labels.n_stages, labels.debt, labels.copies])
    kept, order = order[:0], order if most is None else order[: _CHOICE * most]
    for start in range(0, len(order), _BLOCK):
        block = order[start : start + _BLOCK]
        block = block[~_no_worse(values[kept], values[block]).any(axis=1)]
        block = block[~np.tril(_no_worse(values[block], values[block]), -1).any(axis=1)]
        kept = np.concatenate([kept, block])
    return np.sort(kept[:most])


def _no_worse(some: Floats, others: Floats) -> NDArray[np.bool_]:
    """Return, for each of `others` and each of `some`, whether the latter is nowhere worse."""
    no_worse = np.ones((len(others), len(some)), dtype=bool)
    for column in range(some.shape[1]):
        no_worse &= some[None, :, column] <= others[:, None, column]
    return no_worse
