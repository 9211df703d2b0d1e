"""Labels in arrays: those that no other dominates are those of comparing all pairs; rows of several down-sets; paths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecompile.partitioners.dp import stage_labels
from pipecompile.partitioners.dp.stage_labels import LabelTable, StageLabels, undominated

ROWS = st.lists(
    st.tuples(st.integers(1, 3), st.integers(0, 3), st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=40
)


def labels_of(rows: list[tuple[int, ...]]) -> StageLabels:
    values = np.array(rows)
    return StageLabels(values[:, 0], values[:, 1].astype(float), values[:, 2:].astype(np.int16), np.arange(len(rows)))


@pytest.mark.parametrize("block", [1, 3, 256])
@settings(max_examples=60, deadline=None)
@given(rows=ROWS)
def test_of_all_pairs_those_are_left_that_no_other_dominates(block: int, rows: list[tuple[int, ...]]) -> None:
    wanted: list[int] = []
    for index, row in enumerate(rows):
        others = [*rows[:index], *(other for other in rows[index + 1 :] if other != row)]
        if not any(all(a <= b for a, b in zip(other, row, strict=True)) for other in others):
            wanted.append(index)
    before, stage_labels._BLOCK = stage_labels._BLOCK, block
    try:
        assert undominated(labels_of(rows)).tolist() == wanted
    finally:
        stage_labels._BLOCK = before


def test_rows_of_several_down_sets_come_in_their_order() -> None:
    table = LabelTable(4, StageLabels.of_end(0.5, 2))
    table.add(2, StageLabels(np.array([1, 1]), np.array([0.0, 0.1]), np.zeros((2, 2), np.int16), np.array([0, 0])))
    table.add(0, StageLabels(np.array([2]), np.array([0.0]), np.ones((1, 2), np.int16), np.array([2])))
    rows, places = table.rows_of(np.array([3, 1, 2]))
    assert rows.tolist() == [0, 1, 2]
    assert places.tolist() == [0, 2, 2]
    assert table.labels.debt[rows].tolist() == [0.5, 0.0, 0.1]
    assert table.trace(3) == [0, 2, 3]
    assert table.count.tolist() == [1, 0, 2, 1]
