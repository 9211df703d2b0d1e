"""Views of a table that few clusters read are read through; what many read stays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipecompile.partitioners import Node, Problem, Tensor
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.dp.read_through import ReadThrough, read_through
from pipecompile.partitioners.dp.side_branches import join_side_branches


def decoder(n_layers: int, table: float = 0.5, view: float = 0.0, sent: float = 0.1) -> Problem:
    """Return layers of a query and a key that read a view of one table, and are read by the next layer."""
    nodes, tensors = [Node("x", 5.0), Node("table", table)], [Tensor("x", ("q0", "k0"), 0.1)]
    tensors.append(Tensor("table", tuple(f"view{i}" for i in range(n_layers)), 0.1))
    for i in range(n_layers):
        nodes += [Node(f"view{i}", view), Node(f"q{i}", 2.0), Node(f"k{i}", 2.0), Node(f"out{i}", 3.0)]
        readers = (f"q{i + 1}", f"k{i + 1}")
        tensors.append(Tensor(f"view{i}", (f"q{i}", f"k{i}"), sent))
        tensors += [Tensor(name, (f"out{i}",), 0.1) for name in (f"q{i}", f"k{i}")]
        tensors += [Tensor(f"out{i}", readers, 0.1)] if i + 1 < n_layers else []
    return Problem(tuple(nodes), tuple((t.source, c) for t in tensors for c in t.consumers), tuple(tensors))


def through(problem: Problem, most: float = 1.0) -> tuple[ReadThrough, list[str], set[str]]:
    """Return the result, the names of the clusters before it, and those that are left."""
    joined = join_side_branches(coarsen(problem), 1.0)
    result = read_through(joined, most)
    left = {name for names in result.branches.clusters.members for name in names}
    return result, [names[0] for names in joined.clusters.members], left


def test_views_are_read_through_and_a_table_that_all_layers_read_stays_as_a_relay():
    result, names, left = through(decoder(3, view=0.125))
    assert {names[v] for v in result.readers} == {"view0", "view1", "view2"}
    assert "table" in left
    assert result.work == pytest.approx(0.375)
    clusters = result.branches.clusters
    (relay,) = result.branches.relays
    assert clusters.members[relay] == ("table",)
    (flow,) = (flow for flow in clusters.flows if flow.source == relay)
    assert {clusters.members[v][0] for v in flow.consumers} == {"q0", "k0", "q1", "k1", "q2", "k2"}
    assert {(relay, v) for v in flow.consumers} <= set(clusters.arcs)


def test_a_table_of_two_layers_is_read_through_as_well():
    result, names, left = through(decoder(2))
    assert {names[v] for v in result.readers} == {"table", "view0", "view1"}
    assert not result.branches.relays
    assert left.isdisjoint({"table", "view0", "view1"})


def test_a_cluster_is_placed_with_its_first_reader():
    result, names, _ = through(decoder(2))
    stages = {"x": 0, "q0": 1, "k0": 0, "out0": 1, "q1": 3, "k1": 2, "out1": 3}
    placed = result.place([stages[names[v]] for v in result.kept])
    assert dict(zip(names, placed, strict=True)) == stages | {"view0": 0, "view1": 2, "table": 0}


@pytest.mark.parametrize(
    "problem",
    [decoder(2, sent=0.05), decoder(2, view=1.0), decoder(2, table=1.5)],
    ids=["views that send less than they read", "slow views", "a slow table"],
)
def test_what_sends_less_than_it_reads_or_takes_long_stays(problem):
    result, _, left = through(problem)
    assert not result.readers
    assert {"table", "view0", "view1"} <= left


def test_a_view_that_sends_parts_of_what_it_reads_stays():
    """A stage that reads one part alone would receive all of the table."""
    nodes = (Node("x", 9.0), Node("table", 0.5), Node("halves", 0.1), Node("y", 1.0), Node("z", 1.0))
    tensors = (
        Tensor("x", ("y",), 0.1),
        Tensor("y", ("z",), 0.1),
        Tensor("table", ("halves", "y"), 1.0),
        Tensor("halves", ("y", "z"), 1.0),
        Tensor("halves", ("z",), 0.5),
    )
    problem = Problem(nodes, tuple((t.source, c) for t in tensors for c in t.consumers), tensors)
    result, _, left = through(problem)
    assert not result.readers
    assert "halves" in left
    whole, names, _ = through(replace(problem, tensors=tensors[:4]))
    assert {names[v] for v in whole.readers} == {"table", "halves"}
