"""Paths of stages become shorter at the same bottleneck."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from hypothesis import given, settings
from partitioners.oracle import brute_force, legal_assignments, loads_of, problems

from pipecompile.partitioners import Node, Problem, partition
from pipecompile.partitioners.clusters import adjacency, coarsen
from pipecompile.partitioners.constraints import stage_ranges
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.stage_paths import is_legal, path_moves, shorten_paths, stage_edges

SUM = Problem(
    (Node("a", 4.0), Node("b", 4.0), Node("sum", 0.5), Node("head", 2.0)),
    (("a", "sum"), ("b", "sum"), ("sum", "head")),
)


def test_a_sum_of_towers_goes_to_the_head():
    clusters, machine = coarsen(SUM), Machine.of(SUM, 3)
    before = [0, 1, 1, 2]
    assert stage_edges(clusters, before) == {(0, 1), (1, 2)}
    after = shorten_paths(clusters, machine, before, None, inf)
    assert after == [0, 1, 2, 2]
    assert stage_edges(clusters, after) == {(0, 2), (1, 2)}


def test_what_is_between_two_towers_goes_to_the_first():
    forks = Problem(
        (Node("stem", 2.0), Node("split", 0.5), Node("a", 4.0), Node("b", 4.0), Node("head", 1.0)),
        (("stem", "split"), ("split", "b"), ("stem", "a"), ("a", "head"), ("b", "head")),
    )
    clusters, machine = coarsen(forks), Machine.of(forks, 4)
    names = [members[0] for members in clusters.members]
    before = [{"stem": 0, "split": 1, "a": 1, "b": 2, "head": 3}[name] for name in names]
    after = dict(zip(names, shorten_paths(clusters, machine, before, None, inf), strict=True))
    assert after == {"stem": 0, "split": 0, "a": 1, "b": 2, "head": 3}


def test_a_move_that_costs_is_not_made():
    heavy = Problem((Node("a", 4.0), Node("b", 4.0), Node("sum", 0.5), Node("head", 4.4)), SUM.precedence)
    assert shorten_paths(coarsen(heavy), Machine.of(heavy, 3), [0, 1, 1, 2], None, inf) == [0, 1, 1, 2]


def test_a_pin_holds():
    pinned = Problem(SUM.nodes, SUM.precedence, pins={"sum": 1})
    ranges = ([0, 0, 1, 0], [2, 2, 1, 2])
    assert shorten_paths(coarsen(pinned), Machine.of(pinned, 3), [0, 1, 1, 2], ranges, inf) == [0, 1, 1, 2]
    assert partition(pinned, 3).stage_of["sum"] == 1


@settings(max_examples=60, deadline=None)
@given(problems(direct=True))
def test_the_cut_stays_legal_and_as_good(case):
    problem, n_stages = case
    if brute_force(problem, n_stages)[0] == inf:
        return
    result = partition(problem, n_stages)
    result.verify(problem, n_stages)
    loads = loads_of(problem, result.stage_of, n_stages, result.recompute)
    assert max(load for load, _ in loads) <= result.bottleneck * (1 + 1e-9) + 1e-12


@settings(max_examples=40, deadline=None)
@given(problems(direct=True))
def test_moves_are_legal_and_none_that_ranges_allow_is_left_out(case):
    problem, n_stages = case
    clusters, cut = coarsen(problem), next(iter(legal_assignments(problem, n_stages)), None)
    if cut is None:
        return
    start, ranges = [cut[names[0]] for names in clusters.members], stage_ranges(clusters, n_stages)
    graph = adjacency(clusters)
    free = path_moves(replace(clusters, strict_arcs=frozenset()), n_stages, start, None, graph)
    allowed = [each for each in free if is_legal(clusters, ranges, each)]
    assert list(path_moves(clusters, n_stages, start, ranges, graph)) == allowed
