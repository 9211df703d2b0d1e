"""The fewest stages within a target are those of brute force; without labels they are a bound."""

from __future__ import annotations

from itertools import product
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partitioners.dp.test_stage_candidates import alone, graphs

from pipecompile.partitioners import Node, Problem, Tensor
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.dp import fewest_stages
from pipecompile.partitioners.dp.down_set_listing import list_down_sets
from pipecompile.partitioners.dp.fewest_stages import FewestStages
from pipecompile.partitioners.dp.stage_candidates import find_candidates
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import bottleneck


def count_of(problem: Problem, n_stages: int, target: float, loose: float = 0.0) -> FewestStages:
    clusters = coarsen(problem)
    table = list_down_sets(alone(clusters), Machine.of(problem, n_stages), target).table(n_stages, target)
    candidates = find_candidates(clusters, table, n_stages, target)
    return FewestStages(alone(clusters), candidates, n_stages, loose, sheds=True, multicast=problem.multicast)


def optimum_of(problem: Problem, n_stages: int) -> float:
    clusters, machine = coarsen(problem), Machine.of(problem, n_stages)
    cuts = product(range(n_stages), repeat=len(clusters))
    return min(bottleneck(clusters, machine, cut) for cut in cuts if all(cut[a] <= cut[b] for a, b in clusters.arcs))


@settings(max_examples=80, deadline=None)
@given(graphs(), st.integers(2, 3))
def test_there_is_a_path_iff_a_cut_is_within_the_target(problem, n_stages):
    optimum, highest = optimum_of(problem, n_stages), sum(node.time for node in problem.nodes) + 1.0
    count = count_of(problem, n_stages, highest)
    path = count.path(optimum * (1 + 1e-7) + 1e-9)
    assert path is not None
    assert path[0] == 0
    assert path[-1] == len(count.candidates.table) - 1
    assert len(path) <= n_stages + 1
    assert not count.is_refuted(optimum * (1 + 1e-7) + 1e-9)
    if optimum:
        assert count.path(optimum * (1 - 1e-6)) is None
        assert count.is_complete
        if problem.multicast:
            assert count.is_refuted(optimum * (1 - 1e-6))


def test_a_sender_pays_for_each_receiver_with_labels_alone():
    nodes = (Node("a", 1.0), Node("b", 3.0), Node("c", 3.0))
    problem = Problem(nodes, (("a", "b"), ("b", "c")), (Tensor("a", ("b", "c"), 1.0),), multicast=False)
    count = count_of(problem, 3, 7.0)
    assert not count.is_refuted(4.0)  # 1 + 1, 1 + 3, 1 + 3
    assert count.path(4.0) is not None  # the first stage sends twice: 3
    nodes = (Node("a", 2.5), *nodes[1:])
    count = count_of(Problem(nodes, problem.precedence, problem.tensors, multicast=False), 3, 8.5)
    assert not count.is_refuted(4.0)
    assert count.path(4.0) is None  # 2.5 + 2
    assert count.is_complete


def test_a_search_that_ends_early_says_so(monkeypatch):
    nodes = tuple(Node(str(i), 1.0) for i in range(6))
    problem = Problem(nodes, tuple((str(i), str(i + 1)) for i in range(5)))
    count = count_of(problem, 3, 6.0)
    assert count.path(2.0, deadline=0.0) is None
    assert not count.is_complete
    assert count.path(2.0, inf) == pytest.approx([0, 2, 4, 6])
    monkeypatch.setattr(fewest_stages, "MAX_EXTENSIONS", 0)
    assert count.path(2.0) is None
    assert not count.is_complete


def test_loose_work_needs_time_that_stages_leave_or_stages_of_its_own():
    nodes = tuple(Node(str(i), 1.0) for i in range(4))
    problem = Problem(nodes, tuple((str(i), str(i + 1)) for i in range(3)))
    assert count_of(problem, 3, 2.5, loose=1.0).path(2.0) is not None
    assert count_of(problem, 3, 2.5, loose=2.0).path(2.0) is not None  # a stage of its own
    assert count_of(problem, 3, 2.5, loose=2.5).path(2.0) is None
    assert count_of(problem, 3, 2.5, loose=2.5).path(2.2) is not None
    assert count_of(problem, 2, 2.5, loose=1.0).path(2.4) is None


@settings(max_examples=80, deadline=None)
@given(graphs(), st.integers(2, 3))
def test_with_few_labels_paths_are_missed_and_never_false(problem, n_stages):
    optimum, highest = optimum_of(problem, n_stages), sum(node.time for node in problem.nodes) + 1.0
    count = count_of(problem, n_stages, highest)
    count.most_labels = 1
    assert count.path(highest) is not None
    if optimum:
        assert count.path(optimum * (1 - 1e-6)) is None
