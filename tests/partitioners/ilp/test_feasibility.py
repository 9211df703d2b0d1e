"""If no cut fits, that is proven, and the remedies in the message work."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from random import Random
from time import monotonic

import pytest
from hypothesis import given, settings
from partitioners.oracle import brute_force, problems

from pipecompile.errors import InfeasibleError, PartitionError
from pipecompile.partitioners import Node, Problem, Shared, partition
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.ilp import feasibility
from pipecompile.partitioners.ilp.feasibility import find_fitting_cut
from pipecompile.partitioners.machine import Machine


@settings(max_examples=120, deadline=None)
@given(problems())
def test_a_cut_is_found_exactly_if_one_fits_and_the_hint_is_the_least_limit(case):
    problem, n_stages = case
    optimum, excess = brute_force(problem, n_stages)
    if excess == inf:
        return  # the constraints contradict each other
    clusters, machine = coarsen(problem), Machine.of(problem, n_stages)
    if optimum < inf:
        partition(problem, n_stages).verify(problem, n_stages)
        find_fitting_cut(clusters, machine, inf)
        return
    with pytest.raises(InfeasibleError) as caught:
        find_fitting_cut(clusters, machine, inf)
    numbers = re.match(r"memory_limit=\(?([\d., e+-]+?)\)?(, or|$)", caught.value.hint)[1]
    limits = [float(number) for number in numbers.split(",")]
    enough = replace(problem, memory_limit=limits[0] if len(limits) == 1 else tuple(limits))
    partition(enough, n_stages).verify(enough, n_stages)
    for limit, now in zip(limits, machine.memory_limit, strict=False):
        assert limit - now == pytest.approx(excess, rel=1e-5, abs=1e-5 * limit)
    if (n := re.search(r"n_stages=(\d+)", caught.value.hint)) and problem.speed is None:
        more = replace(problem, in_flight=None) if set(problem.in_flight or (1.0,)) == {1.0} else None
        if more is not None and not isinstance(problem.memory_limit, tuple):
            partition(more, int(n[1])).verify(more, int(n[1]))


def message(problem: Problem, n_stages: int) -> str:
    with pytest.raises(InfeasibleError) as caught:
        partition(problem, n_stages)
    return str(caught.value)


FOUR = tuple(Node(name, 1.0, 10.0) for name in "abcd")


def test_the_binding_stage_is_named():
    text = message(Problem(FOUR, memory_limit=19.0), 2)
    assert "no cut into 2 stages fits in memory" in text
    assert "would hold 20 bytes, its limit is 19" in text
    assert "memory_limit=20, or n_stages=4" in text


def test_a_node_and_a_group_too_large_for_every_stage_are_named():
    text = message(Problem((*FOUR, Node("huge", 1.0, 50.0, 2.0)), memory_limit=40.0, in_flight=(3.0, 2.0)), 2)
    assert "node 'huge': 54 bytes alone, the largest limit is 40" in text
    text = message(Problem(FOUR, groups=(("a", "c"),), memory_limit=15.0), 4)
    assert "nodes 'a', 'c', which share a stage: 20 bytes alone" in text
    assert text.endswith("memory_limit=20")


def test_limits_per_stage_grow_together():
    text = message(Problem(FOUR, precedence=(("a", "b"), ("b", "c"), ("c", "d")), memory_limit=(25.0, 5.0)), 2)
    assert "every limit must grow by 5 bytes" in text
    assert "memory_limit=(30, 10)" in text


def too_large(n: int, share: float) -> Problem:
    """Return a problem of n nodes whose limit is this share of an eighth of their bytes."""
    rng = Random(1)
    nodes = tuple(Node(f"n{i}", rng.random(), float(rng.randint(1, 100))) for i in range(n))
    arcs = sorted({(max(0, i - rng.randint(1, 50)), i) for i in range(1, n) for _ in range(2)})
    limit = sum(node.bytes for node in nodes) / 8 * share
    return Problem(nodes, tuple((f"n{a}", f"n{b}") for a, b in arcs), memory_limit=limit)


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Yield the numbers of stages of all cuts of an order."""
    counted: list[int] = []
    real = feasibility.cut_order

    def counting(clusters, machine, order, ranges):
        counted.append(len(machine))
        return real(clusters, machine, order, ranges)

    monkeypatch.setattr(feasibility, "cut_order", counting)
    return counted


def test_after_the_deadline_a_large_problem_is_cut_once(cuts):
    """Up to 40 cuts of every order were made, whatever the time, and more for the remedies."""
    problem = too_large(150, 0.9)
    with pytest.raises(InfeasibleError, match="proven: every limit must grow by at least") as caught:
        find_fitting_cut(coarsen(problem), Machine.of(problem, 8), monotonic() - 1.0)
    assert cuts == [8]
    limit = float(re.match(r"memory_limit=([\d.]+)$", caught.value.hint)[1])
    enough = replace(problem, memory_limit=limit)
    partition(enough, 8, gap=0.01).verify(enough, 8)


def test_after_the_deadline_nothing_is_said_to_be_proven_that_is_not(cuts):
    problem = too_large(150, 1.0001)
    with pytest.raises(PartitionError, match="nor is it proven that none exists"):
        find_fitting_cut(coarsen(problem), Machine.of(problem, 8), monotonic() - 1.0)
    assert cuts == [8]


def test_a_small_problem_is_searched_to_its_end(cuts):
    """Orders that cannot be better are cut once: each was bisected on its own, with some 25 cuts."""
    problem = too_large(40, 0.9)
    with pytest.raises(InfeasibleError, match="n_stages="):
        find_fitting_cut(coarsen(problem), Machine.of(problem, 8), monotonic() - 1.0)
    assert 5 < cuts.count(8) < 120


def test_bytes_within_the_rounding_of_the_solver_are_told_with_the_limit_that_fits():
    problem = Problem((Node("a", bytes=1e9),), shared=(Shared(("a",), 5.0),), memory_limit=1e9 + 2)
    with pytest.raises(PartitionError, match=r"exceeds its limit by 3 bytes(.|\n)*memory_limit=1000000005$"):
        partition(problem, 1)
    assert partition(replace(problem, memory_limit=1e9 + 5), 1).status == "optimal"
