"""Branches stay apart, what is in a row or of little work becomes one."""

from __future__ import annotations

from pipecompile.partitioners import Node, Problem
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.contraction import contract_branches

FORK = Problem(
    (Node("stem", 1.0), *(Node(f"{side}{i}", 2.0) for i in range(3) for side in "ab"), Node("sum", 0.1), Node("head", 1.0)),
    (("stem", "a0"), ("stem", "b0"), ("a0", "a1"), ("a1", "a2"), ("b0", "b1"), ("b1", "b2"), ("a2", "sum"), ("b2", "sum"),
     ("sum", "head"), ("stem", "a1")),
)  # fmt: skip


def sets(block: float, cap: float) -> set[frozenset[str]]:
    return set(map(frozenset, contract_branches(coarsen(FORK), block, cap).members))


def test_branches_become_one_cluster_each():
    expected = {
        frozenset({"stem"}),
        frozenset({"a0", "a1", "a2"}),
        frozenset({"b0", "b1", "b2"}),
        frozenset({"sum", "head"}),
    }
    assert sets(0.0, 10.0) == expected


def test_a_series_ends_at_the_cap():
    assert frozenset({"a0", "a1"}) in sets(0.0, 4.0)
    assert all(len(names) == 1 for names in sets(0.0, 0.5))


def test_regions_in_a_row_stay_apart():
    blocks = Problem(
        tuple(Node(f"n{i}", 1.0) for i in range(7)),
        tuple((f"n{3 * b + i}", f"n{3 * b + j}") for b in range(2) for i, j in ((0, 1), (0, 2), (1, 3), (2, 3))),
    )
    coarse = contract_branches(coarsen(blocks), 3.0, 0.0)
    assert list(map(set, coarse.members)) == [{"n0", "n1", "n2"}, {"n3", "n4", "n5"}, {"n6"}]


def test_a_region_of_little_work_becomes_one():
    assert sets(13.0, 0.0) == {
        frozenset({"stem", "a0", "a1", "a2", "b0", "b1", "b2"}),
        frozenset({"sum"}),
        frozenset({"head"}),
    }
