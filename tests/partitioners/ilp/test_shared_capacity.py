"""The bound from all stages together never exceeds the optimum, and sees tensors that every stage moves."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from time import monotonic

import pytest
from hypothesis import given, settings
from partitioners.oracle import brute_force, leaves, problems

from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.ilp.shared_capacity import capacity_bound
from pipecompile.partitioners.machine import Machine


@settings(max_examples=60, deadline=None)
@given(problems(memory=False, max_nodes=6))
def test_the_bound_is_below_the_optimum(case):
    optimum, _ = brute_force(*case)
    if 0 < optimum < inf:
        clusters, machine = coarsen(case[0]), Machine.of(*case)
        for target in (optimum, 1.5 * optimum):
            assert capacity_bound(clusters, machine, target, inf) <= optimum * (1 + 1e-6)


def test_tensors_that_every_stage_moves_are_seen():
    #  9 nodes of 2 seconds in 9 stages: 2 seconds of work each, and a stage that does not hold all of them receives or sends
    problem = leaves(8, 1.0)
    clusters, machine = coarsen(problem), Machine.of(problem, 9)
    assert 2.8 < capacity_bound(clusters, machine, 4.9, inf) <= 3.0  # that of the root's stage is a part: 0.64 s
    assert capacity_bound(clusters, machine, 30.0, inf) < 2.5  # all nodes in one stage move nothing


def test_a_target_that_no_stage_of_a_cluster_meets_is_returned():
    problem = leaves(8, 1.0)
    assert capacity_bound(coarsen(problem), Machine.of(problem, 9), 2.9, inf) == pytest.approx(2.9, rel=1e-4)


def test_faster_devices_and_cheaper_links_lower_the_bound():
    problem = leaves(8, 1.0)
    fast = replace(problem, speed=(2.0,) * 9)
    assert 1.6 < capacity_bound(coarsen(fast), Machine.of(fast, 9), 3.9, inf) <= 2.0
    near = replace(problem, links=((0.5,) * 9,) * 9)
    assert 2.3 < capacity_bound(coarsen(near), Machine.of(near, 9), 3.9, inf) <= 2.5


def test_nothing_is_claimed_where_tensors_take_no_time_of_their_own():
    shared = replace(leaves(8, 1.0), placement=(0, 0, *range(1, 8)))
    assert capacity_bound(coarsen(shared), Machine.of(shared, 9), 4.9, inf) == 0.0
    beside = replace(leaves(8, 1.0), overlap=True)
    assert capacity_bound(coarsen(beside), Machine.of(beside, 9), 4.9, inf) == 0.0


def test_after_the_deadline_clusters_count_without_tensors():
    problem = leaves(8, 1.0)
    bound = capacity_bound(coarsen(problem), Machine.of(problem, 9), 4.9, monotonic() + 1e-3)
    assert bound <= 3.0 + 1e-4
