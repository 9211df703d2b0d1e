"""Descent never makes a cut worse or illegal, and finds the move that helps."""

from __future__ import annotations

from math import inf
from time import monotonic

from hypothesis import given, settings
from partitioners.oracle import legal_assignments, problems

from pipecompile.partitioners import Node, Problem, Tensor
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.constraints import stage_ranges
from pipecompile.partitioners.local_search import descend
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import bottleneck
from pipecompile.partitioners.verify import assignment_faults


@settings(max_examples=100, deadline=None)
@given(problems())
def test_descent_keeps_a_cut_legal_and_never_makes_it_worse(case):
    problem, n_stages = case
    clusters, machine = coarsen(problem), Machine.of(*case)
    for stage_of in list(legal_assignments(problem, n_stages))[:2]:
        start = [stage_of[names[0]] for names in clusters.members]
        stage = descend(clusters, machine, start, stage_ranges(clusters, n_stages), inf)
        assert not assignment_faults(problem, clusters.stage_by_node(stage), n_stages)
        assert bottleneck(clusters, machine, stage) <= bottleneck(clusters, machine, start)


def chain(*times: float, tensor: float = 0.0) -> Problem:
    names = [f"v{i}" for i in range(len(times))]
    pairs = tuple(zip(names, names[1:], strict=False))
    nodes = tuple(Node(name, time) for name, time in zip(names, times, strict=True))
    return Problem(nodes, precedence=pairs, tensors=tuple(Tensor(a, (b,), tensor) for a, b in pairs))


def descended(problem: Problem, start: list[int], deadline: float = inf) -> list[int]:
    return descend(coarsen(problem), Machine.of(problem, 1 + max(start)), start, None, deadline)


def test_a_boundary_cluster_moves_and_a_passed_deadline_moves_nothing():
    assert descended(chain(1, 1, 1, 1), [0, 0, 0, 1]) == [0, 0, 1, 1]
    assert descended(chain(1, 1, 1, 1), [0, 0, 0, 1], monotonic() - 1) == [0, 0, 0, 1]


def test_a_move_takes_along_the_clusters_that_precedence_forces():
    #  0 ═══ 0 ─── 0 | 1      the tensor between the second and the third is expensive: each move alone makes the cut worse
    problem = chain(4, 4, 1, 3)
    tensors = (Tensor("v0", ("v1",), 1.0), Tensor("v1", ("v2",), 6.0), Tensor("v2", ("v3",), 1.0))
    problem = Problem(problem.nodes, problem.precedence, tensors)
    assert descended(problem, [0, 0, 0, 1]) == [0, 1, 1, 1]
