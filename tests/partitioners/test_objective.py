"""The objective: drawn cases, and equality with the definition."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partitioners.oracle import choices_of, limits_of, loads_of, problems

from pipecompile.partitioners import Node, Problem, Shared, Tensor, stage_loads
from pipecompile.partitioners.clusters import singleton_clusters
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import LoadTracker

# stage     0        1        2
#           a ─────▶ b ─────▶ c       a is read by b and c, and the gradient of b goes back to a
FAN = Problem(
    (Node("a", 4.0, 10.0, 1.0, 2.0), Node("b", 6.0, 20.0, 2.0, 3.0), Node("c", 8.0, 30.0, 3.0, 4.0)),
    tensors=(Tensor("a", ("b", "c"), 1.0, 7.0), Tensor("b", ("a",), 0.5)),
)
APART = {"a": 0, "b": 1, "c": 2}


@pytest.mark.parametrize(
    ("change", "loads"),
    [
        ({}, [4 + 1 + 0.5, 6 + 0.5 + 1, 8 + 1]),
        ({"multicast": False}, [4 + 2 + 0.5, 6 + 0.5 + 1, 8 + 1]),
        ({"speed": (4.0, 1.0, 2.0)}, [1 + 1 + 0.5, 6 + 0.5 + 1, 4 + 1]),
        ({"speed": (8.0, 1.0, 2.0), "overlap": True}, [1, 6, 4]),
        ({"speed": (8.0, 1.0, 2.0), "overlap": True, "multicast": False}, [2, 6, 4]),
        ({"links": ((9, 2, 3), (4, 9, 5), (6, 7, 9))}, [4 + 3 + 2, 6 + 2 + 2, 8 + 3]),
        ({"links": ((9, 2, 3), (4, 9, 5), (6, 7, 9)), "multicast": False}, [4 + 5 + 2, 6 + 2 + 2, 8 + 3]),
        ({"placement": (0, 1, 0)}, [12 + 1 + 0.5, 6 + 0.5 + 1]),  # c is on the device of a: a goes to b only
        ({"placement": (0, 1, 1), "multicast": False}, [4 + 1 + 0.5, 14 + 0.5 + 1]),  # once for b and c
        ({"recompute": (True, False, True)}, [6 + 1 + 0.5, 6 + 0.5 + 1, 12 + 1]),
    ],
)
def test_compute_sent_and_received_time_of_devices(change, loads):
    assert [row.load for row in stage_loads(replace(FAN, **change), APART, 3)] == loads


def test_a_stage_with_both_consumers_receives_once_and_a_stage_of_its_own_pays_nothing():
    assert [row.received for row in stage_loads(FAN, {"a": 0, "b": 1, "c": 1}, 2)] == [0.5, 1.0]
    assert [row.load for row in stage_loads(FAN, dict.fromkeys("abc", 0), 2)] == [18.0, 0.0]


@pytest.mark.parametrize(
    ("change", "memory"),
    [
        ({}, [11, 20 + 2 + 7, 30 + 3 + 7]),
        ({"in_flight": (3, 2, 1)}, [10 + 3 * 1, 20 + 2 * (2 + 7), 30 + 3 + 7]),
        ({"in_flight": (3, 2, 1), "recompute": (True, True, True)}, [10 + 1, 20 + 2 * 7 + 2, 30 + 7 + 3]),
        ({"placement": (0, 1, 0), "in_flight": (3, 2, 1)}, [10 + 3 + 30 + 3 + 7, 20 + 2 * 9]),
        ({"shared": (Shared(("a", "c"), 100.0),)}, [111, 29, 140]),
        ({"shared": (Shared(("a", "c"), 100.0),), "placement": (0, 1, 0)}, [11 + 40 + 100, 29]),
    ],
)
def test_memory_of_devices(change, memory):
    assert [row.memory for row in stage_loads(replace(FAN, **change), APART, 3)] == memory


def test_only_as_many_stages_recompute_as_it_takes_to_fit():
    nodes = (Node("a", 4.0, 0.0, 6.0, 1.0), Node("b", 4.0, 0.0, 6.0, 2.0), Node("c", 4.0, 0.0, 6.0, 3.0))
    problem = Problem(nodes, in_flight=(3.0, 3.0, 3.0), placement=(0, 0, 0), recompute="auto")
    for limit, loads, memory in ((54, 12, 54), (53, 13, 42), (41, 15, 30), (18, 18, 18)):
        (row,) = stage_loads(replace(problem, memory_limit=float(limit)), APART, 3)
        assert (row.load, row.memory) == (loads, memory)


@settings(max_examples=150, deadline=None)
@given(problems(), st.data())
def test_loads_are_those_of_the_definition(case, data):
    problem, n_stages = case
    stage_of = {node.name: data.draw(st.integers(0, n_stages - 1)) for node in problem.nodes}
    for recompute in choices_of(problem, n_stages):
        rows = stage_loads(problem, stage_of, n_stages, recompute)
        expected = loads_of(problem, stage_of, n_stages, recompute)
        assert [row.load for row in rows] == pytest.approx([load for load, _ in expected])
        assert [row.memory for row in rows] == pytest.approx([memory for _, memory in expected])


@settings(max_examples=150, deadline=None)
@given(problems(), st.data())
def test_moves_keep_the_loads_exact_and_recomputation_is_chosen_best(case, data):
    problem, n_stages = case
    stages = st.integers(0, n_stages - 1)
    tracker = LoadTracker(singleton_clusters(problem), Machine.of(*case), [data.draw(stages) for _ in problem.nodes])
    for cluster, target in data.draw(st.lists(st.tuples(st.integers(0, len(problem.nodes) - 1), stages), max_size=5)):
        tracker.move(cluster, target)
    stage_of = {node.name: s for node, s in zip(problem.nodes, tracker.assignment, strict=True)}
    values = []
    for recompute in choices_of(problem, n_stages):
        rows = loads_of(problem, stage_of, n_stages, recompute)
        room = limits_of(problem, n_stages)
        find_fitting_cut = all(memory <= limit * (1 + 1e-9) for (_, memory), limit in zip(rows, room, strict=True))
        values.append(max(load for load, _ in rows) if find_fitting_cut else inf)
    assert tracker.bottleneck() == pytest.approx(min(values), abs=1e-9)
    rows = loads_of(problem, stage_of, n_stages, tracker.recompute())
    assert [row.load for row in tracker.device_loads()] == pytest.approx([load for load, _ in rows], abs=1e-9)
