"""Merging clusters is lossless, and assignments of merged clusters project back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from partitioners.oracle import legal_assignments, loads_of, problems

from pipecompile.partitioners import Node, Problem, Tensor
from pipecompile.partitioners import clusters as clusters_module
from pipecompile.partitioners.clusters import (
    Flow,
    adjacency,
    coarsen,
    head_and_tail_sums,
    merge,
    transitive_closure,
    transitive_reduction,
)
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import LoadTracker


def test_a_group_merges_the_clusters_between_its_nodes():
    problem = Problem(
        tuple(Node(name, time, 1.0, 2.0) for name, time in zip("abcd", (1.0, 2.0, 4.0, 8.0), strict=True)),
        precedence=(("a", "b"), ("b", "c"), ("c", "d")),
        tensors=(
            Tensor("a", ("b",), 5.0),
            Tensor("b", ("d",), 1.0),
            Tensor("c", ("d", "a"), 2.0),
            Tensor("d", ("a",), 3.0),
        ),
        groups=(("a", "c"),),
    )
    clusters = coarsen(problem)
    assert clusters.members == (("a", "b", "c"), ("d",))
    assert clusters.time == (7.0, 8.0)
    assert clusters.bytes == (3.0, 1.0)
    assert clusters.activation == (6.0, 2.0)
    assert clusters.arcs == ((0, 1),)
    assert clusters.flows == (Flow(0, (1,), 3.0), Flow(1, (0,), 3.0))


@settings(max_examples=40, deadline=None)
@given(problems(max_nodes=6))
def test_cluster_assignments_are_the_legal_ones_with_the_same_loads(case):
    problem, n_stages = case
    clusters, machine = coarsen(problem), Machine.of(problem, n_stages)
    assert all(a < b for a, b in clusters.arcs)
    for stage_of in legal_assignments(problem, n_stages):
        assert all(len({stage_of[name] for name in names}) == 1 for names in clusters.members)
        rows = LoadTracker(clusters, machine, [stage_of[names[0]] for names in clusters.members]).device_loads(
            (False,) * n_stages
        )
        for row, (load, memory) in zip(rows, loads_of(problem, stage_of, n_stages), strict=True):
            assert row.load == pytest.approx(load, abs=1e-9)
            assert row.memory == pytest.approx(memory, abs=1e-9)


def test_an_assignment_of_merged_clusters_is_projected_to_the_original_clusters():
    clusters = coarsen(Problem(tuple(Node(name) for name in "abcd"), precedence=(("a", "b"), ("c", "d"))))
    merged = merge(clusters, [(0, 2)])
    stages = [1 if "b" in names else 0 for names in merged.members]
    assert clusters.project(merged, stages) == [int("b" in names) for names in clusters.members]


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
    monkeypatch.setattr(clusters_module, "BLOCK", 3)
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
