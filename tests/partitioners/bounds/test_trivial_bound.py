"""Bounds never exceed the optimum, and meet it where they should."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from partitioners.oracle import brute_force, problems

from pipecompile.partitioners import Node, Problem
from pipecompile.partitioners.bounds.trivial_bound import trivial_lower_bound
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.machine import Machine


@settings(max_examples=80, deadline=None)
@given(problems())
def test_the_bound_is_below_the_optimum(case):
    assert trivial_lower_bound(coarsen(case[0]), Machine.of(*case)) <= brute_force(*case)[0]


@pytest.mark.parametrize(
    ("times", "speed", "bound"),
    [((2.0, 2.0, 2.0), None, 3.0), ((5.0, 1.0), None, 5.0), ((5.0, 1.0), (1.0, 5.0), 1.0), ((), None, 0.0)],
)
def test_even_share_and_heaviest_cluster(times, speed, bound):
    problem = Problem(tuple(Node(str(i), time) for i, time in enumerate(times)), speed=speed)
    assert trivial_lower_bound(coarsen(problem), Machine.of(problem, 2)) == pytest.approx(bound)
