"""A reduced graph says whether it is exact, and its cuts go back to cuts of all clusters."""

from __future__ import annotations

import pytest
from partitioners.dp.test_read_through import decoder

from pipecompile.partitioners import Node, Problem, Tensor
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.dp.reduced_graph import reduced, shed_parts
from pipecompile.partitioners.dp.side_branches import join_side_branches
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import LoadTracker


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


def shed(times: tuple[float, float, float], target: float) -> tuple[list[float], dict[str, int]]:
    """Cut a ─▶ b ─▶ c, a stage each, where c reads two tables; return loads and stages after shedding."""
    nodes = (*map(Node, "abc", times), Node("small", 1.0), Node("large", 3.0))
    tensors = (
        *(Tensor(source, (reader,), 0.25) for source, reader in ("ab", "bc")),
        *(Tensor(table, ("c",), 0.25) for table in ("small", "large")),
    )
    problem = Problem(nodes, tuple((t.source, *t.consumers) for t in tensors), tensors)
    clusters, machine = coarsen(problem), Machine.of(problem, 3)
    stage = {"a": 0, "b": 1, "c": 2, "small": 2, "large": 2}
    start = [stage[names[0]] for names in clusters.members]
    cut = shed_parts(clusters, machine, start, join_side_branches(clusters, 1.0).parts, target)
    return [load.load for load in LoadTracker(clusters, machine, cut).device_loads()], clusters.stage_by_node(cut)


def test_the_smallest_piece_that_is_enough_goes_to_the_last_stage_with_time():
    loads, stage = shed((1.0, 4.0, 1.5), 5.0)  # c has 5.75
    assert (stage["small"], stage["large"]) == (0, 2)  # b would have 5.75
    assert loads == pytest.approx([2.5, 4.5, 5.0])


def test_the_largest_goes_where_no_piece_is_enough_and_then_another():
    loads, stage = shed((2.5, 1.0, 3.0), 4.8)  # c has 7.25, and 4.5 without the large one
    assert (stage["small"], stage["large"]) == (2, 1)
    assert loads == pytest.approx([2.75, 4.75, 4.5])
    loads, stage = shed((2.5, 1.0, 4.0), 4.8)
    assert (stage["small"], stage["large"]) == (0, 1)
    assert loads == pytest.approx([4.0, 4.75, 4.75])


def test_nothing_moves_where_there_is_no_time():
    _, stage = shed((5.0, 5.0, 3.0), 5.0)
    assert (stage["small"], stage["large"]) == (2, 2)
