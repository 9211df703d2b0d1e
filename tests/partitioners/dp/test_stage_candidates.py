"""Candidate stages are all pairs of down-sets within a target, with the loads that the objective gives them."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecompile.partitioners import Node, Problem, Tensor
from pipecompile.partitioners.clusters import Clusters, coarsen
from pipecompile.partitioners.dp import stage_candidates
from pipecompile.partitioners.dp.down_set_listing import list_down_sets
from pipecompile.partitioners.dp.side_branches import JoinedBranches
from pipecompile.partitioners.dp.stage_candidates import find_candidates
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import LoadTracker


@st.composite
def graphs(draw: st.DrawFn) -> Problem:
    """Draw up to six nodes with tensors that flow forwards, and precedence along them."""
    n = draw(st.integers(2, 6))
    names = [f"v{i}" for i in range(n)]
    nodes = tuple(Node(name, float(draw(st.integers(0, 4)))) for name in names)
    tensors = []
    for i in range(n - 1):
        readers = draw(st.lists(st.sampled_from(names[i + 1 :]), max_size=3, unique=True))
        parts = [tuple(readers)] if draw(st.booleans()) else [(reader,) for reader in readers]
        tensors += [Tensor(names[i], part, draw(st.sampled_from((0.0, 0.5, 1.0, 2.0)))) for part in parts if part]
    precedence = tuple((t.source, c) for t in tensors for c in t.consumers)
    return Problem(nodes, precedence, tuple(tensors), multicast=draw(st.booleans()))


def alone(clusters: Clusters) -> JoinedBranches:
    return JoinedBranches(clusters, np.zeros(len(clusters)), 1.0)


@settings(max_examples=80, deadline=None)
@given(graphs(), st.integers(2, 3))
def test_loads_are_those_of_the_middle_of_three_stages_with_each_tensor_sent_once(problem, n_stages):
    clusters = coarsen(problem)
    machine = Machine.of(Problem(problem.nodes), 3)
    target = sum(clusters.time) + 100.0
    table = list_down_sets(alone(clusters), Machine.of(problem, n_stages), target).table(n_stages, target)
    found = find_candidates(clusters, table, n_stages, target)
    pairs = [
        (j, i) for j, i in product(range(len(table)), repeat=2) if (table.inside[j] <= table.inside[i]).all() and j < i
    ]
    reached = {0, *found.after.tolist()}
    assert {(int(j), int(i)) for j, i in zip(found.before, found.after, strict=True)} <= set(pairs)
    assert {j for j, _ in pairs} <= reached
    for j, i, load in zip(found.before, found.after, found.load, strict=True):
        stages = 2 - table.inside[j].astype(int) - table.inside[i].astype(int)
        once = LoadTracker(clusters, machine, stages.tolist()).device_loads()[1]
        assert load == pytest.approx(once.load)  # with the default, multicast


def test_stages_of_a_chain_are_those_that_a_cut_within_the_target_can_have():
    nodes = tuple(Node(str(i), 1.0) for i in range(6))
    branches = alone(coarsen(Problem(nodes, tuple((str(i), str(i + 1)) for i in range(5)))))
    table = list_down_sets(branches, Machine.of(Problem(nodes), 3), 2.0).table(3, 2.0)
    found = find_candidates(branches.clusters, table, 3, 2.0)
    assert list(zip(found.before.tolist(), found.after.tolist(), strict=True)) == [(0, 1), (1, 2), (2, 3)]


def test_too_many_candidates_are_declined(monkeypatch):
    nodes = tuple(Node(str(i), 1.0) for i in range(8))  # no precedence: 2 ** 8 down-sets
    branches = alone(coarsen(Problem(nodes)))
    table = list_down_sets(branches, Machine.of(Problem(nodes), 3), 8.0).table(3, 8.0)
    assert find_candidates(branches.clusters, table, 3, 8.0) is not None
    assert find_candidates(branches.clusters, table, 3, 8.0, deadline=0.0) is None
    monkeypatch.setattr(stage_candidates, "MAX_CANDIDATES", 100)
    assert find_candidates(branches.clusters, table, 3, 8.0) is None


def test_down_sets_of_more_than_a_word_are_told_apart():
    names = [f"{tower}{i}" for tower in "ab" for i in range(70)]
    arcs = tuple((f"{tower}{i}", f"{tower}{i + 1}") for tower in "ab" for i in range(69))
    nodes = tuple(Node(name, float(name[1:] in {"0", "69"})) for name in names)
    branches = alone(coarsen(Problem(nodes, arcs)))
    table = list_down_sets(branches, Machine.of(Problem(nodes), 4), 1.0).table(4, 1.0)
    found = find_candidates(branches.clusters, table, 4, 1.0)
    assert len(table) == 71 * 71
    assert all((table.inside[j] <= table.inside[i]).all() for j, i in zip(found.before, found.after, strict=True))
