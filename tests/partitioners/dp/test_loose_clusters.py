"""Little components are set aside, and fill the stages with the least load."""

from __future__ import annotations

import pytest

from pipecompile.partitioners import Node, Problem, Shared, Tensor
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.dp.loose_clusters import set_aside
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import LoadTracker

NODES = (Node("count", 0.5), Node("a", 4.0), Node("copy", 0.25), Node("b", 3.0), Node("tick", 0.25), Node("tower", 2.0))
PROBLEM = Problem(
    NODES,
    (("a", "b"), ("copy", "tick")),
    (Tensor("a", ("b",), 0.5), Tensor("copy", ("tick",), 0.5)),
    shared=(Shared(("a", "count"), 8.0),),
)


def test_components_are_set_aside_up_to_a_size_and_the_rest_is_a_problem_of_its_own():
    clusters = coarsen(PROBLEM)
    loose = set_aside(clusters, 0.5)
    names = lambda numbers: {clusters.members[v][0] for v in numbers}  # noqa: E731
    assert sorted(map(sorted, map(names, loose.components))) == [["copy", "tick"], ["count"]]
    assert names(loose.kept) == {"a", "b", "tower"}
    assert loose.work == pytest.approx(1.0)
    assert [members[0] for members in loose.rest.members] == ["a", "b", "tower"]
    assert (loose.rest.arcs, len(loose.rest.flows), loose.rest.shared) == (((0, 1),), 1, (((0,), 8.0),))
    assert names(set_aside(clusters, 2.0).kept) == {"a", "b"}


def test_a_graph_in_one_piece_and_its_largest_component_stay():
    clusters = coarsen(Problem(NODES[1:2]))
    loose = set_aside(clusters, 100.0)
    assert (loose.kept, loose.components, loose.work) == ((0,), (), 0.0)
    assert loose.rest is clusters
    assert loose.place(clusters, Machine.of(PROBLEM, 2), [1]) == [1]


def test_components_go_where_the_load_is_least():
    clusters, machine = coarsen(PROBLEM), Machine.of(PROBLEM, 3)
    loose = set_aside(clusters, 0.5)
    stage = clusters.stage_by_node(loose.place(clusters, machine, [0, 1, 2]))
    assert {name: stage[name] for name in ("a", "b", "tower")} == {"a": 0, "b": 1, "tower": 2}
    assert [stage[name] for name in ("count", "copy", "tick")] == [2, 2, 2]
    loads = LoadTracker(clusters, machine, [stage[names[0]] for names in clusters.members]).device_loads()
    assert [load.load for load in loads] == pytest.approx([4.5, 3.5, 3.0])
