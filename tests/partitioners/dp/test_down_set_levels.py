"""Levels hold all down-sets of a size, with their work, and masks become rows."""

from __future__ import annotations

from itertools import combinations

import pytest

from pipecompile.partitioners.clusters import Flow
from pipecompile.partitioners.dp.down_set_levels import DownSetLevels, as_rows

TIME, ARCS = (1.0, 2.0, 4.0, 8.0), ((0, 1), (0, 2), (1, 3), (2, 3))


def neighbours() -> tuple[list[list[int]], list[list[int]]]:
    return [[a for a, b in ARCS if b == v] for v in range(4)], [[b for a, b in ARCS if a == v] for v in range(4)]


def test_each_level_has_the_down_sets_of_its_size():
    levels, found = DownSetLevels(TIME, neighbours()), list[dict[int, float]]()
    while levels.level:
        found.append({mask: work for mask, (_, work, _) in levels.level.items()})
        levels.advance(100)
    for size, level in enumerate(found):
        sets = [set(chosen) for chosen in combinations(range(4), size)]
        closed = [one for one in sets if all(a in one for a, b in ARCS if b in one)]
        assert level == {sum(1 << v for v in one): sum(TIME[v] for v in one) for one in closed}
    assert len(found) == 5


def test_a_begin_free_clusters_and_a_bound_of_work_restrict_the_levels():
    levels = DownSetLevels(TIME, neighbours(), begin=0b0001, free={1, 2}, most_work=5.0)
    assert {mask: work for mask, (_, work, _) in levels.level.items()} == {0b0001: 1.0}
    levels.advance(100)
    assert {mask: work for mask, (_, work, _) in levels.level.items()} == {0b0011: 3.0, 0b0101: 5.0}
    levels.advance(100)
    assert not levels.level


def test_a_level_that_is_too_wide_is_left_early():
    levels = DownSetLevels((1.0,) * 6, ([[] for _ in range(6)], [[] for _ in range(6)]))
    levels.advance(100)
    levels.advance(5)
    assert 5 < len(levels.level) < 15


def test_masks_are_unpacked_from_the_lowest_bit():
    assert as_rows([0b1, 0b1000000010], 10).tolist() == [[1, *[0] * 9], [0, 1, *[0] * 7, 1]]


def test_what_leaves_a_down_set_is_what_has_readers_outside():
    flows = [Flow(0, (1, 2), 1.0), Flow(1, (3,), 10.0), Flow(2, (3,), 100.0), Flow(3, (), 1000.0)]
    levels = DownSetLevels(TIME, neighbours(), flows=flows)
    while levels.level:
        for mask, (_, _, leaving) in levels.level.items():
            inside = {v for v in range(4) if mask >> v & 1}
            crossing = [flow.time for flow in flows if flow.source in inside and not inside.issuperset(flow.consumers)]
            assert leaving == pytest.approx(sum(crossing))
        levels.advance(100)
