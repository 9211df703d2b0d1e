"""No cut at or below the target leaves its windows."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from partitioners.oracle import legal_assignments, loads_of, problems

from pipecompile.partitioners import Node, Problem
from pipecompile.partitioners.clusters import Stages, coarsen
from pipecompile.partitioners.windows import reachable, windows


def test_work_before_and_after_bounds_a_chain_from_both_sides():
    problem = Problem(tuple(Node(x, 1.0) for x in "abcd"), precedence=(("a", "b"), ("b", "c"), ("c", "d")))
    clusters, stages = coarsen(problem), Stages.of(problem, 3)
    assert windows(clusters, stages, 1.2) == [(0, -1), (1, 0), (2, 1), (3, 2)]  # nothing is that good
    assert windows(clusters, stages, 2.0) == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert windows(clusters, stages, 4.0) == [(0, 2)] * 4
    assert reachable(clusters).sum() == 10


@settings(max_examples=80, deadline=None)
@given(problems(most=7), st.floats(1.0, 30.0))
def test_every_cut_that_meets_the_target_is_inside(case, target):
    problem, n_stages = case
    clusters, stages = coarsen(problem), Stages.of(problem, n_stages)
    allowed = windows(clusters, stages, target)
    for stage_of in legal_assignments(problem, n_stages):
        rows = zip(loads_of(problem, stage_of, n_stages), stages.limit, strict=True)
        if all(load <= target and memory <= limit for (load, memory), limit in rows):
            for names, (first, last) in zip(clusters.members, allowed, strict=True):
                assert first <= stage_of[names[0]] <= last
