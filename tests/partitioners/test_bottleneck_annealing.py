"""Annealing keeps a cut legal, never makes it worse, and finds exchanges that descent does not."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from time import monotonic

from hypothesis import given, settings
from partitioners.oracle import legal_assignments, problems

from pipecompile.partitioners import Node, Problem
from pipecompile.partitioners.bottleneck_annealing import anneal
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.constraints import stage_ranges
from pipecompile.partitioners.local_search import descend
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import bottleneck
from pipecompile.partitioners.verify import assignment_faults


@settings(max_examples=30, deadline=None)
@given(problems())
def test_annealing_keeps_a_cut_legal_and_never_makes_it_worse(case):
    problem, n_stages = case
    clusters, machine = coarsen(problem), Machine.of(*case)
    for stage_of in list(legal_assignments(problem, n_stages))[:1]:
        start = [stage_of[names[0]] for names in clusters.members]
        stage = anneal(clusters, machine, start, stage_ranges(clusters, n_stages), monotonic() + 0.02)
        assert not assignment_faults(problem, clusters.stage_by_node(stage), n_stages)
        assert bottleneck(clusters, machine, stage) <= bottleneck(clusters, machine, start)


def apart(*times: float) -> Problem:
    return Problem(tuple(Node(f"v{i}", time) for i, time in enumerate(times)), precedence=(), tensors=())


def test_clusters_change_places():
    #  8 + 5 and 6 + 4 and 7 + 3: no single move helps, 11 in each stage are three exchanges away
    problem = apart(8, 5, 6, 4, 7, 3)
    clusters, machine, start = coarsen(problem), Machine.of(problem, 3), [0, 0, 1, 1, 2, 2]
    assert bottleneck(clusters, machine, descend(clusters, machine, start, None, inf)) > 11
    assert bottleneck(clusters, machine, anneal(clusters, machine, start, None, monotonic() + 0.5)) == 11


def test_other_machines_and_an_ended_deadline_leave_the_cut_as_it_is():
    problem, start = apart(3, 1, 1, 1), [0, 0, 0, 1]
    clusters = coarsen(problem)
    assert anneal(clusters, Machine.of(problem, 2), start, None, monotonic() - 1) == start
    others = {"memory_limit": 10.0}, {"placement": (0, 0)}, {"recompute": (True, True)}, {"links": ((1, 2), (3, 1))}
    for other in ({"overlap": True}, *others):
        machine = Machine.of(replace(problem, **other), 2)
        assert anneal(clusters, machine, start, None, monotonic() + 0.05) == start
