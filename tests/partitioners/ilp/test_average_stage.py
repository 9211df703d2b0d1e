"""The bound from one stage never exceeds the optimum, whatever the weights, and sees whole clusters and their tensors."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partitioners.oracle import brute_force, leaves, problems

from pipecompile.partitioners import partition
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.ilp.average_stage import average_bound
from pipecompile.partitioners.ilp.shared_capacity import capacity_bound
from pipecompile.partitioners.machine import Machine


@settings(max_examples=60, deadline=None)
@given(problems(max_nodes=6), st.lists(st.integers(0, 5), min_size=6, max_size=6))
def test_the_bound_of_any_weights_is_below_the_optimum(case, weights):
    optimum, _ = brute_force(*case)
    if 0 < optimum < inf:
        clusters, machine = coarsen(case[0]), Machine.of(*case)
        for own in (clusters.time, weights[: len(clusters)]):
            assert average_bound(clusters, machine, own, 1.5 * optimum, inf) <= optimum * (1 + 1e-6)


def test_a_stage_of_average_work_holds_whole_nodes_and_moves_tensors():
    #  82 seconds in 8 stages, 10.25 each: some stage has six nodes, 12 seconds, and receives or sends for half a second
    problem = leaves(40, 0.5)
    clusters, machine = coarsen(problem), Machine.of(problem, 8)
    bound = average_bound(clusters, machine, clusters.time, 20.0, inf)
    assert bound == pytest.approx(12.5, rel=1e-3)
    assert capacity_bound(clusters, machine, 20.0, inf) < 11.0
    assert average_bound(clusters, machine, clusters.time, 12.0, inf) == pytest.approx(12.0, rel=1e-3)


def test_a_search_whose_linear_programs_leave_a_gap_ends_with_a_proof():
    found = partition(leaves(40, 0.5), 8, time_limit=20.0)
    assert found.bottleneck == pytest.approx(12.5)
    assert found.gap <= 0.001


def test_nothing_is_claimed_where_stages_differ_or_tensors_take_no_time_of_their_own():
    problem = leaves(8, 1.0)
    for other in ({"speed": (1.0, *(2.0,) * 8)}, {"overlap": True}, {"placement": (0, 0, *range(1, 8))}):
        case = replace(problem, **other)
        clusters = coarsen(case)
        assert average_bound(clusters, Machine.of(case, 9), clusters.time, 4.9, inf) == 0.0
