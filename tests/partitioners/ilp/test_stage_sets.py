"""Loads of sets are those of such stages, only convex sets are found, and climbs end at sets that no change makes heavier."""

from __future__ import annotations

from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from partitioners.oracle import legal_assignments, problems

from pipecompile.partitioners import Node, Problem, Tensor
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.ilp.stage_sets import StageSets, mask_of, members_of
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import LoadTracker


@settings(max_examples=60, deadline=None)
@given(problems(memory=False, max_nodes=6))
def test_every_stage_of_a_legal_cut_is_convex_and_no_set_has_more_than_its_load(case):
    problem, n_stages = case
    clusters, machine = coarsen(problem), Machine.of(*case)
    if machine.overlap or not machine.is_one_to_one or len(set(machine.speed)) > 1:
        return
    sets = StageSets(clusters, machine)
    for stage_of in list(legal_assignments(problem, n_stages))[:5]:
        cut = [stage_of[names[0]] for names in clusters.members]
        tracker = LoadTracker(clusters, machine, cut)
        for stage in range(n_stages):
            mask = mask_of(v for v, s in enumerate(cut) if s == stage)
            assert sets.is_convex(mask)
            assert sets.load(mask) <= tracker.device_loads()[stage].load * (1 + 1e-9)


def chain(*times: float, tensor: float) -> StageSets:
    names = [f"v{i}" for i in range(len(times))]
    pairs = tuple(zip(names, names[1:], strict=False))
    nodes = tuple(Node(name, time) for name, time in zip(names, times, strict=True))
    problem = Problem(nodes, precedence=pairs, tensors=tuple(Tensor(a, (b,), tensor) for a, b in pairs))
    return StageSets(coarsen(problem), Machine.of(problem, 2))


def test_a_set_with_a_cluster_of_others_between_its_own_is_not_convex():
    sets = chain(1, 1, 1, tensor=0.5)
    assert [sets.is_convex(mask) for mask in (0b011, 0b111, 0b101)] == [True, True, False]
    assert [sets.load(mask) for mask in (0b010, 0b011, 0b111)] == [2.0, 2.5, 3.0]
    assert list(members_of(0b1010)) == [1, 3]


def test_a_climb_adds_exchanges_and_keeps_the_limit():
    sets = chain(1, 1, 1, 4, tensor=0.0)
    assert sets.climbed(0b0001, [1.0, 1.0, 1.0, 1.0], 3.0, Random(0)) == 0b0111
    assert sets.climbed(0b0100, [0.0, 0.0, 0.1, 5.0], 4.0, Random(0)) == 0b1000
    assert sets.climbed(0b0001, [1.0, 1.0, 1.0, 1.0], inf, Random(0)) == 0b1111


def test_the_load_of_a_climb_is_that_of_its_set():
    sets = chain(1, 2, 3, 1, 2, 3, tensor=0.5)
    reached = sets.climbed(0b000100, [1.0] * 6, 7.0, Random(0))
    assert sets.is_convex(reached)
    assert sets.load(reached) <= 7.0
    assert sets._changed_load(0b000100, sets.load(0b000100), 0b000110 ^ 0b000100) == pytest.approx(sets.load(0b000110))
