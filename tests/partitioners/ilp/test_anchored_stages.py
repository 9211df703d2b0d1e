"""The bound of an anchor never exceeds the optimum."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from partitioners.oracle import brute_force, problems

from pipecompile.partitioners import Node, Problem, Tensor
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.ilp.anchored_stages import anchor_bound
from pipecompile.partitioners.machine import Machine


@settings(max_examples=40, deadline=None)
@given(problems(memory=False, max_nodes=6))
def test_the_bound_is_below_the_optimum(case):
    optimum, _ = brute_force(*case)
    if optimum > 0:
        assert anchor_bound(coarsen(case[0]), Machine.of(*case), optimum, inf) <= optimum * (1 + 1e-6)


def test_expensive_tensors_around_a_heavy_node_decide():
    #  a ══ 5 ══▶ b ══ 5 ══▶ c      b alone costs 10 + 5 + 5, with a neighbour 10 + 1 + 5, all in one stage 12
    nodes = (Node("a", 1.0), Node("b", 10.0), Node("c", 1.0))
    problem = Problem(
        nodes,
        precedence=(("a", "b"), ("b", "c")),
        tensors=(Tensor("a", ("b",), 5.0), Tensor("b", ("c",), 5.0)),
    )
    assert anchor_bound(coarsen(problem), Machine.of(problem, 8), 20.0, inf) == pytest.approx(12.0)
