"""Faults of problems and of assignments, all at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipecompile.errors import VerifyError
from pipecompile.partitioners import Node, Problem, Shared, Tensor, verify_problem
from pipecompile.partitioners.verify import assignment_faults, memory_text, problem_faults, verify_assignment

# stage     0        1        2
#           a ─────▶ b ─────▶ c       a is consumed by b and c, and the gradient of b goes back to a
FAN = Problem(
    (Node("a", 4.0, 10.0, 1.0, 2.0), Node("b", 6.0, 20.0, 2.0, 3.0), Node("c", 8.0, 30.0, 3.0, 4.0)),
    tensors=(Tensor("a", ("b", "c"), 1.0, 7.0), Tensor("b", ("a",), 0.5)),
)
APART = {"a": 0, "b": 1, "c": 2}
CHAIN = Problem(
    (Node("a", 1.0), Node("b", 2.0), Node("c", 3.0)),
    precedence=(("a", "b"), ("b", "c")),
    tensors=(Tensor("a", ("b",), 0.5), Tensor("b", ("c", "a"), 0.25)),
)
NODES = tuple(Node(name, 1.0) for name in "abcd")


def test_each_cycle_is_one_fault_and_is_printed():
    faults = problem_faults(Problem(NODES, precedence=(("a", "b"), ("b", "a"), ("c", "d"), ("d", "d"))))
    assert faults == ["precedence has a cycle: 'a' -> 'b' -> 'a'", "precedence has a cycle: 'd' -> 'd'"]


def test_a_cycle_made_by_a_group_is_legal_and_one_beside_it_is_not():
    # a ─▶ b ─▶ c with a, c in one group: all three share a stage
    induced = Problem(NODES, precedence=(("a", "b"), ("b", "c")), groups=(("a", "c"),))
    assert problem_faults(induced) == []
    beside = Problem(NODES, precedence=(("a", "b"), ("b", "a")), groups=(("a", "c"),))
    assert problem_faults(beside) == ["precedence has a cycle: 'a' -> 'b' -> 'a'"]


def test_a_cycle_inside_one_group_is_legal():
    assert problem_faults(Problem(NODES, precedence=(("a", "b"), ("b", "a")), groups=(("a", "b"),))) == []


def test_assignment_faults_come_all_at_once():
    problem = Problem(NODES, precedence=(("a", "b"),), groups=(("b", "c"),))
    faults = assignment_faults(problem, {"a": 1, "b": 0, "c": 2, "z": 0}, 2)
    assert faults == [
        "node 'd' has no stage",
        "node 'z' is not in the problem",
        "node 'c' is in stage 2, expected 0 to 1",
        "'a' precedes 'b', yet is in stage 1 and 'b' in stage 0",
        "group 0 is spread over 2 stages: 'b' in 0, 'c' in 2",
    ]
    assert assignment_faults(problem, {"a": 0, "b": 1, "c": 1, "d": 0}, 2) == []


def test_verify_assignment_names_memory_beside_the_other_faults():
    problem = replace(FAN, precedence=(("a", "b"),), memory_limit=30.0)
    with pytest.raises(VerifyError) as caught:
        verify_assignment(problem, {"a": 1, "b": 0, "c": 0}, 2)
    assert caught.value.faults == (
        "'a' precedes 'b', yet is in stage 1 and 'b' in stage 0",
        "stage 0 holds 62 bytes, its limit is 30 bytes",
    )
    verify_assignment(replace(problem, memory_limit=62.0), {"a": 0, "b": 1, "c": 1}, 2)


def test_verify_assignment_requires_the_recomputation_that_the_problem_fixes():
    problem = replace(FAN, recompute=(True, False, False))
    with pytest.raises(VerifyError, match="stage 0 does not recompute, but the problem says that it must"):
        verify_assignment(problem, APART, 3, (False, False, False))
    verify_assignment(problem, APART, 3, (True, False, False))


def test_verify_problem_reports_all_faults_at_once():
    broken = replace(
        CHAIN,
        nodes=(*CHAIN.nodes, Node("a", -1.0), Node("d", float("nan")), Node("e", 1.0, forward=2.0)),
        precedence=(*CHAIN.precedence, ("c", "a"), ("x", "a")),
        tensors=(Tensor("a", (), 1.0), Tensor("b", ("b",), 1.0, -1.0), Tensor("y", ("c", "c"), float("inf"))),
        groups=(("a", "z"),),
        memory_limit=(1.0, 2.0),
        in_flight=(1.0, 1.0, -1.0),
        speed=(1.0, 0.0),
        links=((1.0, -1.0),),
        shared=(Shared(("a", "s"), -2.0), Shared(())),
        pins={"p": 1},
        apart=(("b", "b"),),
        name="mine",
    )
    with pytest.raises(VerifyError) as caught:
        verify_problem(broken)
    text = str(caught.value)
    for part in (
        "'mine' is not legal: 23 faults",
        "node 'a' appears 2 times",
        "precedence 3 names 'x'",
        "tensor 2 names 'y'",
        "group 0 names 'z'",
        "tensor 0 from 'a' has no consumer",
        "tensor 1 from 'b' is consumed by its own source",
        "names its consumer 'c' 2 times",
        "time of node 'a' is -1.0",
        "time of node 'd' is nan",
        "time of tensor 2 from 'y' is inf",
        "in_flight of stage 2 is -1.0",
        "speed of stage 1 is 0",
        "forward of node 'e' is 2, expected at most its time, 1",
        "bytes of tensor 1 from 'b' is -1.0",
        "links from device 0 to 1 is -1.0",
        "links has 1 row,",
        "shared 0 names 's'",
        "shared 1 has no node",
        "bytes of shared 0 is -2.0",
        "pins names 'p'",
        "apart 0 names 'b' twice",
        "memory_limit has 2, speed has 2, links has 1, in_flight has 3",
        "'a' -> 'b' -> 'c' -> 'a'",
    ):
        assert part in text
    assert len(caught.value.faults) == 23


def test_a_speed_by_which_seconds_divide_to_infinity_is_refused() -> None:
    problem = Problem(nodes=(Node("a", 1.0),), speed=(1e-308,))
    with pytest.raises(VerifyError, match="speed of stage 0 is 1e-308, expected at least 1e-100"):
        verify_problem(problem)


def test_sizes_are_written_with_a_unit():
    assert memory_text(1) == "1 byte"
    assert memory_text(0) == "0 bytes"
    assert memory_text(2.0**20 - 1) == "1.04858e+06 bytes"
    assert memory_text(3 * 2.0**20) == "3 MiB"
    assert memory_text(1.5 * 2.0**30) == "1.5 GiB"


def test_times_whose_sums_are_infinite_are_a_fault() -> None:
    problem = Problem(nodes=(Node("a", 1e308), Node("b", 1e308)), precedence=(("a", "b"),))
    with pytest.raises(VerifyError, match=r"time of node 'a' is 1e\+308, expected at most 1e\+100"):
        verify_problem(problem)


@pytest.mark.parametrize(
    "parts",
    [
        {"precedence": (("a", "z"),)},
        {"precedence": (("a", "b"), ("b", "a"))},
        {"groups": (("a", "z"),)},
        {"apart": (("a", "a"),)},
        {"nodes": "aa"},
    ],
)
def test_long_names_are_shortened(parts):
    """Before, each fault wrote names of 5,000 characters whole."""
    long = {letter: letter * 5000 for letter in "abz"}
    names = {
        key: tuple(tuple(long[x] for x in entry) for entry in value) for key, value in parts.items() if key != "nodes"
    }
    nodes = tuple(Node(long[x], 1.0) for x in parts.get("nodes", "ab"))
    faults = problem_faults(Problem(nodes, **names))
    assert faults
    assert max(map(len, faults)) < 400


def test_of_a_long_cycle_the_ends_are_written():
    names = [f"n{i:02}" for i in range(30)]
    problem = Problem(tuple(Node(n, 1.0) for n in names), tuple(zip(names, names[1:] + names[:1], strict=True)))
    assert problem_faults(problem) == ["precedence has a cycle: 'n00' -> 'n01' -> 'n02' -> ... -> 'n29' -> 'n00'"]
