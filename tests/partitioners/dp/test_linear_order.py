"""The cut of one linear order is the best of all cuts of that order."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from math import inf
from time import perf_counter

import pytest
from hypothesis import given, settings
from partitioners.oracle import legal_assignments, problems

from pipecompile.partitioners import Node, Problem
from pipecompile.partitioners.clusters import Clusters, coarsen
from pipecompile.partitioners.constraints import stage_ranges
from pipecompile.partitioners.dp.linear_order import cut_order
from pipecompile.partitioners.dp.topological_orders import candidate_orders
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import bottleneck
from pipecompile.partitioners.verify import assignment_faults


def best_of_order(problem: Problem, clusters: Clusters, stages: Machine, order: list[int]) -> float:
    """Every way to put the ends of the stages, one after the other."""
    n, best = len(order), inf
    for ends in itertools.combinations_with_replacement(range(n + 1), len(stages) - 1):
        stage = [0] * n
        for position, cluster in enumerate(order):
            stage[cluster] = sum(end <= position for end in ends)
        if not assignment_faults(problem, clusters.stage_by_node(stage), len(stages)):
            best = min(best, bottleneck(clusters, stages, stage))
    return best


@settings(max_examples=150, deadline=None)
@given(problems(multicast=True, direct=True))
def test_the_cut_is_the_best_of_its_order(case):
    problem, n_stages = case
    clusters, stages = coarsen(problem), Machine.of(*case)
    span = stage_ranges(clusters, n_stages)
    if not any(legal_assignments(problem, n_stages)):
        return
    for order in candidate_orders(clusters, span):
        best = best_of_order(problem, clusters, stages, order)
        for cap in (inf, best if best < inf else 1.0):
            stage = cut_order(clusters, stages, order, span, cap)
            found = inf if stage is None else bottleneck(clusters, stages, stage)
            assert found == pytest.approx(best)
            assert stage is None or not assignment_faults(problem, clusters.stage_by_node(stage), n_stages)


@settings(max_examples=100, deadline=None)
@given(problems(multicast=True, rich=False))
def test_without_tensors_too(case):
    problem = replace(case[0], tensors=())
    clusters, stages = coarsen(problem), Machine.of(problem, case[1])
    order = next(candidate_orders(clusters))
    stage = cut_order(clusters, stages, order)
    found = inf if stage is None else bottleneck(clusters, stages, stage)
    assert found == pytest.approx(best_of_order(problem, clusters, stages, order))


def chain(n: int) -> Problem:
    draw = random.Random(n)
    nodes = tuple(Node(f"v{i}", draw.random()) for i in range(n))
    return Problem(nodes, precedence=tuple((f"v{i}", f"v{i + 1}") for i in range(n - 1)))


def test_a_long_chain_is_cut_exactly_and_fast():
    problem = chain(2000)
    clusters, stages = coarsen(problem), Machine.of(problem, 16)
    begin = perf_counter()
    stage = cut_order(clusters, stages, range(2000))
    seconds = perf_counter() - begin
    assert stage is not None
    assert stage == sorted(stage)
    found = bottleneck(clusters, stages, stage)
    assert stages_needed(clusters.time, found * (1 + 1e-12)) <= 16
    assert stages_needed(clusters.time, found * (1 - 1e-9)) > 16
    assert seconds < 0.5  # 0.015 on a quiet machine


def stages_needed(times: tuple[float, ...], limit: float) -> int:
    """Fill one stage after the other: the fewest stages with no load above the limit (none can hold a longer time)."""
    count, load = 1, 0.0
    for time in times:
        count, load = (count, load + time) if load + time <= limit else (count + 1, time)
    return count
