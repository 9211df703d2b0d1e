"""The dynamic program over all down-sets is exact."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from partitioners.oracle import brute_force, problems

from pipecompile.partitioners import Node, Problem
from pipecompile.partitioners.bounds.stage_windows import compute_windows
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.dp.down_sets import cut_down_sets, enumerate_down_sets
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import bottleneck


@settings(max_examples=120, deadline=None)
@given(problems(direct=True))
def test_the_cut_is_optimal_or_without_multicast_a_lower_bound(case):
    clusters, machine = coarsen(case[0]), Machine.of(*case)
    optimum, _ = brute_force(*case)
    windows = compute_windows(clusters, machine, inf)
    assert not windows.is_empty or optimum == inf
    stage, bound = (
        (None, inf)
        if windows.is_empty
        else cut_down_sets(clusters, machine, enumerate_down_sets(clusters, windows, len(machine)))
    )
    result = inf if stage is None else bottleneck(clusters, machine, stage)
    assert bound <= optimum * (1 + 1e-9)
    assert result >= optimum * (1 - 1e-9)
    assert (stage is None) == (optimum == inf)
    if machine.multicast or all(len(flow.consumers) == 1 for flow in clusters.flows):
        assert result == pytest.approx(optimum)
        assert bound == pytest.approx(optimum)


def test_too_many_pairs_of_down_sets_are_declined():
    nodes = tuple(Node(str(i), 1.0) for i in range(6))  # no precedence: 2 ** 6 down-sets
    clusters, machine = coarsen(Problem(nodes)), Machine.of(Problem(nodes), 3)
    result = enumerate_down_sets(clusters, compute_windows(clusters, machine, inf), 3)
    assert [len(band) for band in result] == [1, 64, 64, 1]
    pairs = 64 + 64 * 64 + 64
    assert cut_down_sets(clusters, machine, result, max_pairs=pairs - 1) is None
    stage, bound = cut_down_sets(clusters, machine, result, max_pairs=pairs)
    assert bound == 2.0
    assert sorted(stage) == [0, 0, 1, 1, 2, 2]


def test_a_boundary_without_a_down_set_refutes_the_target():
    towers = Problem(tuple(Node(name, 1.0) for name in "abcd"))
    clusters, machine = coarsen(towers), Machine.of(towers, 2)
    down_sets = [np.zeros((1, 4), np.uint8), np.zeros((0, 4), np.uint8), np.ones((1, 4), np.uint8)]
    assert cut_down_sets(clusters, machine, down_sets, 1.5) == (None, inf)


def test_listing_ends_as_soon_as_one_size_has_too_many_down_sets():
    nodes = tuple(Node(str(i), 1.0) for i in range(400))  # no precedence: 10.6 million down-sets of three clusters
    clusters = coarsen(Problem(nodes))
    windows = compute_windows(clusters, Machine.of(Problem(nodes), 2), inf)

    assert enumerate_down_sets(clusters, windows, 2) is None


@pytest.mark.parametrize(("deadline", "is_listed"), [(inf, True), (0.0, False)])
def test_a_deadline_ends_the_listing_once_many_were_passed(monkeypatch, deadline, is_listed):
    nodes = tuple(Node(str(i), 1.0) for i in range(8))
    clusters = coarsen(Problem(nodes))
    windows = compute_windows(clusters, Machine.of(Problem(nodes), 2), inf)
    windows.min_work[0] = windows.max_work[0] = 4.0  # 163 down-sets on the way to the 70 of four clusters
    monkeypatch.setattr("pipecompile.partitioners.dp.down_sets.MAX_DOWN_SETS", 130)

    assert (enumerate_down_sets(clusters, windows, 2, deadline) is not None) == is_listed
    monkeypatch.setattr("pipecompile.partitioners.dp.down_sets.MAX_DOWN_SETS", 200)
    assert enumerate_down_sets(clusters, windows, 2, deadline) is not None
