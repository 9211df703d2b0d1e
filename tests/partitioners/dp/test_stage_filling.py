"""A filled stage reaches as far as any stage of its budget; cuts of filled stages are legal and meet targets that can be met."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import inf
from time import monotonic

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partitioners.oracle import brute_force, problems

from pipecompile.partitioners import Node, Problem, Tensor
from pipecompile.partitioners.clusters import Clusters, coarsen
from pipecompile.partitioners.dp import stage_filling
from pipecompile.partitioners.dp.stage_filling import StageFiller, can_fill, fill_below, narrowest
from pipecompile.partitioners.dp.strategy import candidate_orders
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import bottleneck
from pipecompile.partitioners.verify import assignment_faults

plain = problems(memory=False, multicast=True, rich=False, max_nodes=9)


def side_of(clusters: Clusters, order: list[int], *, forwards: bool) -> StageFiller:
    return StageFiller(clusters, narrowest(clusters, [order], forwards=forwards), forwards=forwards)


def closed_sets(clusters: Clusters, *, forwards: bool) -> list[set[int]]:
    """Return the sets that hold all ancestors, or all descendants, of their members."""
    arcs = clusters.arcs if forwards else [(b, a) for a, b in clusters.arcs]
    chosen = itertools.product((False, True), repeat=len(clusters))
    sets = [{v for v, inside in enumerate(bits) if inside} for bits in chosen]
    return [members for members in sets if all(a in members for a, b in arcs if b in members)]


def load_and_reach(clusters: Clusters, before: set[int], after_too: set[int], weight: float) -> tuple[float, float]:
    """Return the load of the stage between two sets, and its reach, by definition."""
    inside = after_too - before
    load = reach = sum(clusters.time[v] for v in inside)
    for flow in clusters.flows:
        ends = {flow.source, *flow.consumers}
        if flow.source in inside:
            load += flow.time * (bool(set(flow.consumers) & before) + bool(set(flow.consumers) - after_too))
        elif inside & ends:
            load += flow.time
        crosses = ends - after_too and (ends & after_too)
        reach -= weight * flow.time * bool(crosses)
    return load, reach


@pytest.mark.parametrize("forwards", [True, False])
@settings(max_examples=60, deadline=None)
@given(case=plain, draw=st.data())
def test_no_stage_of_the_budget_reaches_further(forwards, case, draw):
    clusters = coarsen(case[0])
    sets = closed_sets(clusters, forwards=forwards)
    before = draw.draw(st.sampled_from(sets))
    budget, weight = draw.draw(st.floats(0.0, 40.0)), draw.draw(st.sampled_from([0.5, 1.0]))
    rows = [load_and_reach(clusters, before, s, weight) for s in sets if before <= s]
    start = load_and_reach(clusters, before, before, weight)[1]
    best = max(reach for load, reach in rows if load <= budget)
    mask = np.array([v in before for v in range(len(clusters))])
    order = next(candidate_orders(clusters))
    inside = side_of(clusters, order, forwards=forwards).fill(mask, budget, weight)
    assert inside is not None
    chosen = before | {v for v in range(len(clusters)) if inside[v]}
    assert chosen in sets
    load, reach = load_and_reach(clusters, before, chosen, weight)
    assert load <= budget * (1 + 1e-9)
    assert reach == pytest.approx(best, abs=1e-4 * budget + 1e-9)
    assert start <= best


@settings(max_examples=60, deadline=None)
@given(problems(memory=False, direct=True, constrained=False), st.floats(0.5, 2.0))
def test_cuts_of_filled_stages_are_legal(case, factor):
    problem, n_stages = replace(case[0], overlap=False, shared=(), recompute=None), case[1]
    clusters, machine = coarsen(problem), Machine.of(problem, n_stages)
    assert can_fill(clusters, machine)
    optimum = brute_force(problem, n_stages)[0]
    for forwards, order in itertools.product((True, False), candidate_orders(clusters)):
        cut = fill_below(side_of(clusters, order, forwards=forwards), machine, optimum * factor, 1.0)
        assert cut is not None
        assert not assignment_faults(problem, clusters.stage_by_node(cut), n_stages)


def ladder(rungs: int) -> Problem:
    """Return two chains side by side that meet at the ends."""
    names = [f"{side}{i}" for i in range(rungs) for side in "ab"]
    pairs = [*zip(names, names[2:], strict=False), ("in", "a0"), ("in", "b0"), (names[-2], "out"), (names[-1], "out")]
    nodes = [Node("in", 1.0), *(Node(name, 2.0) for name in names), Node("out", 1.0)]
    return Problem(tuple(nodes), tuple(pairs), tuple(Tensor(a, (b,), 0.5) for a, b in pairs), multicast=False)


@pytest.mark.parametrize("forwards", [True, False])
def test_stages_are_filled_to_the_optimum_where_the_first_cut_is_worse(forwards):
    problem = ladder(4)
    clusters, machine = coarsen(problem), Machine.of(problem, 3)
    optimum = brute_force(problem, 3)[0]
    order = next(candidate_orders(clusters))
    cut = fill_below(side_of(clusters, order, forwards=forwards), machine, optimum, 1.0)
    assert cut is not None
    assert bottleneck(clusters, machine, cut) == pytest.approx(optimum)


def test_a_frontier_that_is_too_wide_is_given_up(monkeypatch):
    clusters = coarsen(ladder(6))
    filler = side_of(clusters, next(candidate_orders(clusters)), forwards=True)
    monkeypatch.setattr(stage_filling, "MAX_STATES", 1)
    assert filler.fill(np.zeros(len(clusters), dtype=bool), inf, 1.0) is None
    assert fill_below(filler, Machine.of(ladder(6), 2), 10.0, 1.0) is None


def test_the_narrowest_order_takes_one_branch_after_the_other():
    names = [f"{branch}{i}" for branch in "abcdef" for i in range(4)]
    pairs = [(a, b) for a, b in itertools.pairwise(names) if a[0] == b[0]]
    pairs += [("in", f"{branch}0") for branch in "abcdef"] + [(f"{branch}3", "out") for branch in "abcdef"]
    problem = Problem(tuple(Node(name, 1.0) for name in ("in", *names, "out")), tuple(pairs))
    clusters = coarsen(problem)
    by_branch = list(range(len(clusters)))
    by_level = [0, *sorted(range(1, 25), key=lambda v: clusters.members[v][0][1]), 25]
    for forwards in (True, False):
        assert narrowest(clusters, [by_level, by_branch], forwards=forwards) == by_branch


def test_stages_are_filled_only_where_their_loads_are_those_of_the_objective():
    problem = ladder(3)
    clusters = coarsen(problem)
    assert can_fill(clusters, Machine.of(problem, 3))
    for change in ({"overlap": True}, {"memory_limit": 9.0}, {"placement": (0, 1, 0)}, {"links": ((1.0,) * 3,) * 3},
                   {"recompute": (True, False, False)}):  # fmt: skip
        assert not can_fill(clusters, Machine.of(replace(problem, **change), 3))
    assert not can_fill(coarsen(replace(problem, pins={"a0": 1})), Machine.of(problem, 3))


def test_filling_ends_at_the_deadline():
    """One filling of a graph of 2,000 nodes took half a minute beyond a time limit of ten seconds."""
    clusters = coarsen(ladder(6))
    filler = side_of(clusters, next(candidate_orders(clusters)), forwards=True)
    machine = Machine.of(ladder(6), 2)
    assert fill_below(filler, machine, 10.0, 1.0, monotonic() + 60.0) is not None
    assert fill_below(filler, machine, 10.0, 1.0, monotonic() - 1.0) is None
