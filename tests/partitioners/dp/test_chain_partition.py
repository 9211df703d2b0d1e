"""The cut of one linear order is the best of all cuts of that order."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from partitioners.oracle import legal_assignments, problems

from pipecompile.partitioners import Node, Problem
from pipecompile.partitioners.clusters import Clusters, coarsen
from pipecompile.partitioners.constraints import stage_ranges
from pipecompile.partitioners.dp.chain_partition import cut_order
from pipecompile.partitioners.dp.strategy import candidate_orders
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import bottleneck
from pipecompile.partitioners.verify import assignment_faults
from tests.support.cpu_time import assert_within


def best_of_order(problem: Problem, clusters: Clusters, machine: Machine, order: list[int]) -> float:
    """Return the least bottleneck over all positions of the ends of the stages."""
    n, best = len(order), inf
    for ends in itertools.combinations_with_replacement(range(n + 1), len(machine) - 1):
        stage = [0] * n
        for position, cluster in enumerate(order):
            stage[cluster] = sum(end <= position for end in ends)
        if not assignment_faults(problem, clusters.stage_by_node(stage), len(machine)):
            best = min(best, bottleneck(clusters, machine, stage))
    return best


@settings(max_examples=150, deadline=None)
@given(problems(multicast=True, direct=True))
def test_the_cut_is_the_best_of_its_order(case):
    problem, n_stages = case
    clusters, machine = coarsen(problem), Machine.of(*case)
    span = stage_ranges(clusters, n_stages)
    if not any(legal_assignments(problem, n_stages)):
        return
    for order in candidate_orders(clusters, span):
        best = best_of_order(problem, clusters, machine, order)
        for cap in (inf, best if best < inf else 1.0):
            stage = cut_order(clusters, machine, order, span, cap)
            result = inf if stage is None else bottleneck(clusters, machine, stage)
            assert result == pytest.approx(best)
            assert stage is None or not assignment_faults(problem, clusters.stage_by_node(stage), n_stages)


@settings(max_examples=100, deadline=None)
@given(problems(multicast=True, rich=False))
def test_the_cut_without_tensors_is_the_best_of_its_order(case):
    problem = replace(case[0], tensors=())
    clusters, machine = coarsen(problem), Machine.of(problem, case[1])
    order = next(candidate_orders(clusters))
    stage = cut_order(clusters, machine, order)
    result = inf if stage is None else bottleneck(clusters, machine, stage)
    assert result == pytest.approx(best_of_order(problem, clusters, machine, order))


def chain(n: int) -> Problem:
    draw = random.Random(n)
    nodes = tuple(Node(f"v{i}", draw.random()) for i in range(n))
    return Problem(nodes, precedence=tuple((f"v{i}", f"v{i + 1}") for i in range(n - 1)))


def test_a_long_chain_is_cut_exactly_and_fast():
    problem = chain(2000)
    clusters, machine = coarsen(problem), Machine.of(problem, 16)
    stage = cut_order(clusters, machine, range(2000))
    assert stage is not None
    assert stage == sorted(stage)
    value = bottleneck(clusters, machine, stage)
    assert stages_needed(clusters.time, value * (1 + 1e-12)) <= 16
    assert stages_needed(clusters.time, value * (1 - 1e-9)) > 16
    assert_within(0.5, lambda: cut_order(clusters, machine, range(2000)))  # 0.015 on a quiet machine


def stages_needed(times: tuple[float, ...], limit: float) -> int:
    """Return the fewest stages with no load above the limit: fill one stage after the other."""
    count, load = 1, 0.0
    for time in times:
        count, load = (count, load + time) if load + time <= limit else (count + 1, time)
    return count
