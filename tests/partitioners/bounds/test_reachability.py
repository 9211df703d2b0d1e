"""Closure, reduction and sums over ancestors, on a drawn graph and against matrix powers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from partitioners.oracle import problems

from pipecompile.partitioners import Node, Problem
from pipecompile.partitioners.bounds import reachability
from pipecompile.partitioners.bounds.reachability import (
    adjacency,
    head_and_tail_sums,
    transitive_closure,
    transitive_reduction,
)
from pipecompile.partitioners.clusters import coarsen

#     ┌─▶ b ─┐
#   a ┤      ├─▶ d     and the shortcut a ─▶ d
#     └─▶ c ─┘
DIAMOND = Problem(
    tuple(Node(name, time) for name, time in zip("abcd", (1.0, 2.0, 4.0, 8.0), strict=True)),
    precedence=(("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"), ("a", "d")),
)


def test_a_diamond() -> None:
    clusters = coarsen(DIAMOND)
    assert adjacency(clusters) == ([[], [0], [0], [0, 1, 2]], [[1, 2, 3], [3], [3], []])
    assert transitive_closure(clusters).astype(int).tolist() == [[1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 1, 1], [0, 0, 0, 1]]
    assert transitive_reduction(clusters) == [(0, 1), (0, 2), (1, 3), (2, 3)]
    head, tail = head_and_tail_sums(clusters, np.array([clusters.time]))
    assert head.tolist() == [[1, 3, 5, 15]]
    assert tail.tolist() == [[15, 10, 12, 8]]


def test_blocks_of_columns_give_the_same_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    clusters = coarsen(DIAMOND)
    whole = head_and_tail_sums(clusters, np.array([clusters.time]))
    monkeypatch.setattr(reachability, "BLOCK", 3)
    for part, sums in zip(head_and_tail_sums(clusters, np.array([clusters.time])), whole, strict=True):
        assert part.tolist() == sums.tolist()
    assert transitive_reduction(clusters) == list(clusters.arcs), "too many clusters: the arcs as they are"


@settings(max_examples=60, deadline=None)
@given(problems(max_nodes=9))
def test_the_reduction_generates_the_closure_and_sums_follow_it(case) -> None:
    clusters = coarsen(case[0])
    closure = transitive_closure(clusters)
    n = len(clusters)
    step = np.eye(n, dtype=bool)
    for a, b in transitive_reduction(clusters):
        step[a, b] = True
    assert (np.linalg.matrix_power(step.astype(float), n) > 0).tolist() == closure.tolist()
    head, tail = head_and_tail_sums(clusters, np.array([clusters.time]))
    assert head[0] == pytest.approx(closure.T @ np.array(clusters.time))
    assert tail[0] == pytest.approx(closure @ np.array(clusters.time))
