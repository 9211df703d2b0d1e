"""Cycles, and assignments that break the rules."""

from __future__ import annotations

from pipecompile.partitioners import Node, Problem
from pipecompile.partitioners.verify import assignment_faults, problem_faults

NODES = tuple(Node(name, 1.0) for name in "abcd")


def test_each_cycle_is_one_fault_and_is_printed():
    faults = problem_faults(Problem(NODES, precedence=(("a", "b"), ("b", "a"), ("c", "d"), ("d", "d"))))
    assert faults == ["precedence has a cycle: a -> b -> a", "precedence has a cycle: d -> d"]


def test_a_cycle_made_by_a_group_is_legal_and_one_beside_it_is_not():
    # a ─▶ b ─▶ c with a, c in one group: all three share a stage
    induced = Problem(NODES, precedence=(("a", "b"), ("b", "c")), groups=(("a", "c"),))
    assert problem_faults(induced) == []
    beside = Problem(NODES, precedence=(("a", "b"), ("b", "a")), groups=(("a", "c"),))
    assert problem_faults(beside) == ["precedence has a cycle: a -> b -> a"]


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
