"""A reduced graph says whether it is exact, and its cuts go back to cuts of all clusters."""

from __future__ import annotations

import pytest
from partitioners.dp.test_read_through import decoder

from pipecompile.partitioners import Node, Problem, Tensor
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.dp.reduced_graph import reduced
from pipecompile.partitioners.machine import Machine


def test_a_chain_is_itself():
    nodes = tuple(Node(name, 1.0) for name in "abc")
    problem = Problem(nodes, (("a", "b"), ("b", "c")), (Tensor("a", ("b",), 0.5), Tensor("b", ("c",), 0.5)))
    clusters = coarsen(problem)
    graph = reduced(clusters, Machine.of(problem, 2))
    assert graph.is_exact
    assert graph.branches.clusters == clusters
    assert graph.expand([0, 1, 1], 3.0) == [0, 1, 1]


def test_what_left_comes_back_in_an_order_that_is_legal():
    base = decoder(4, table=0.2)
    nodes = (*base.nodes, Node("noise", 0.1), *(Node(f"count{i}", 0.05) for i in range(3)))
    noise = Tensor("noise", ("out1",), 0.2)
    problem = Problem(nodes, (*base.precedence, ("noise", "out1")), (*base.tensors, noise), multicast=False)
    clusters, machine = coarsen(problem), Machine.of(problem, 3)
    graph = reduced(clusters, machine)
    assert not graph.is_exact
    assert len(graph.loose.components) == 3
    assert graph.loose_work == pytest.approx(0.15)
    left = graph.branches.clusters
    assert len(left) == len(clusters) - 3 - 1 - 4  # counters, noise, views
    third = len(left) // 3
    cut = graph.expand([min(v // third, 2) for v in range(len(left))], 100.0)
    assert all(cut[a] <= cut[b] for a, b in clusters.arcs)
    stage = clusters.stage_by_node(cut)
    assert stage["noise"] == stage["out1"]
    assert stage["view3"] == min(stage["q3"], stage["k3"])
