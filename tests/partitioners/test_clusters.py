"""Merging clusters is lossless, and assignments of merged clusters project back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from partitioners.oracle import legal_assignments, loads_of, problems

from pipecompile.partitioners import Node, Problem, Tensor
from pipecompile.partitioners.clusters import Flow, coarsen, merge
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
