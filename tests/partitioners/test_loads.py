"""The objective: drawn cases, and equality with the definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partitioners.oracle import loads_of, problems

from pipecompile.errors import VerifyError
from pipecompile.partitioners import Node, Problem, Tensor, stage_loads
from pipecompile.partitioners.loads import verify_assignment

# stage     0        1        2
#           a ─────▶ b ─────▶ c       a is read by b and c, and the gradient of b goes back to a
FAN = Problem(
    (Node("a", 4.0, 10.0, 1.0), Node("b", 6.0, 20.0, 2.0), Node("c", 8.0, 30.0, 3.0)),
    tensors=(Tensor("a", ("b", "c"), 1.0), Tensor("b", ("a",), 0.5)),
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
    ],
)
def test_sent_and_received_are_charged_to_the_right_stages(change, loads):
    assert [row.load for row in stage_loads(replace(FAN, **change), APART, 3)] == loads


def test_a_stage_with_both_consumers_receives_once_and_a_stage_of_its_own_pays_nothing():
    assert [row.received for row in stage_loads(FAN, {"a": 0, "b": 1, "c": 1}, 2)] == [0.5, 1.0]
    assert [row.load for row in stage_loads(FAN, dict.fromkeys("abc", 0), 2)] == [18.0, 0.0]


def test_memory_counts_activations_per_micro_batch_in_flight():
    rows = stage_loads(replace(FAN, in_flight=(3.0, 2.0, 1.0)), APART, 3)
    assert [row.memory for row in rows] == [13.0, 24.0, 33.0]


@settings(max_examples=100, deadline=None)
@given(problems(), st.data())
def test_loads_are_those_of_the_definition(case, data):
    problem, n_stages = case
    stage_of = {node.name: data.draw(st.integers(0, n_stages - 1)) for node in problem.nodes}
    rows = stage_loads(problem, stage_of, n_stages)
    expected = loads_of(problem, stage_of, n_stages)
    assert [row.load for row in rows] == pytest.approx([load for load, _ in expected])
    assert [row.memory for row in rows] == pytest.approx([memory for _, memory in expected])


def test_verify_assignment_names_memory_beside_the_other_faults():
    problem = replace(FAN, precedence=(("a", "b"),), memory_limit=30.0)
    with pytest.raises(VerifyError) as caught:
        verify_assignment(problem, {"a": 1, "b": 0, "c": 0}, 2)
    assert caught.value.faults == (
        "'a' precedes 'b', yet is in stage 1 and 'b' in stage 0",
        "stage 0 holds 55 bytes, its limit is 30",
    )
    verify_assignment(replace(problem, memory_limit=55.0), {"a": 0, "b": 1, "c": 1}, 2)
