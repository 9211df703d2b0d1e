"""A cut below a target is found iff there is one, with every receiver paid for."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from partitioners.dp.test_chain_partition import best_of_order
from partitioners.oracle import dense_blocks, legal_assignments, problems

from pipecompile.partitioners import Node, Problem, Tensor
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.constraints import stage_ranges
from pipecompile.partitioners.dp import counted_copies
from pipecompile.partitioners.dp.chain_partition import cut_order
from pipecompile.partitioners.dp.counted_copies import counts_copies, cut_order_below
from pipecompile.partitioners.dp.strategy import candidate_orders
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import bottleneck
from pipecompile.partitioners.verify import assignment_faults


def holds(problem: Problem, n_stages: int) -> int:
    """Check all orders of a problem whose copies can be counted, and return their number."""
    clusters, machine, checked = coarsen(problem), Machine.of(problem, n_stages), 0
    ranges = stage_ranges(clusters, n_stages)
    for order in candidate_orders(clusters, ranges):
        if counts_copies(clusters, machine, order):
            best = best_of_order(problem, clusters, machine, order)
            if best < inf:
                cut, is_proof = cut_order_below(clusters, machine, order, ranges, best * (1 + 1e-9), inf)
                assert cut is not None
                assert is_proof
                assert bottleneck(clusters, machine, cut) == pytest.approx(best)
                assert not assignment_faults(problem, clusters.stage_by_node(cut), n_stages)
            below = best * (1 - 1e-6) if 0 < best < inf else -1.0 if best == 0 else 1e9
            assert cut_order_below(clusters, machine, order, ranges, below, inf) == (None, True)
            checked += 1
    return checked


@settings(max_examples=60, deadline=None)
@given(dense_blocks())
def test_dense_blocks_are_cut_iff_a_cut_is_below_the_target(case):
    problem, n_stages = replace(case[0], multicast=False), case[1]
    holds(problem, n_stages)


@settings(max_examples=60, deadline=None)
@given(problems(multicast=False, direct=True))
def test_memory_constraints_and_speeds_are_kept(case):
    if any(legal_assignments(*case)):
        holds(*case)


def dense(layers: int) -> tuple[Problem, int]:
    """Return a chain in which every layer consumes all layers before it."""
    names = [f"v{i}" for i in range(layers)]
    tensors = tuple(Tensor(a, tuple(names[i + 1 :]), 1.0) for i, a in enumerate(names[:-1]))
    return Problem(tuple(Node(name, 4.0) for name in names), tuple(zip(names, names[1:], strict=False)), tensors,
                   multicast=False), 4  # fmt: skip


def test_the_program_that_pays_once_is_worse_than_the_one_that_counts():
    problem, n_stages = dense(10)
    clusters, machine = coarsen(problem), Machine.of(problem, n_stages)
    once = bottleneck(clusters, machine, cut_order(clusters, machine, range(10)) or [])
    counted, _ = cut_order_below(clusters, machine, range(10), None, once * (1 - 1e-6), inf)
    assert counted is not None
    assert bottleneck(clusters, machine, counted) < once
    assert holds(problem, n_stages) == 1


def test_a_search_that_is_broken_off_proves_nothing(monkeypatch):
    problem, n_stages = dense(10)
    clusters, machine = coarsen(problem), Machine.of(problem, n_stages)
    monkeypatch.setattr(counted_copies, "MAX_SUFFIXES", 3)
    assert cut_order_below(clusters, machine, range(10), None, 100.0, inf) == (None, False)
    monkeypatch.undo()
    assert cut_order_below(clusters, machine, range(10), None, 100.0, -inf) == (None, False)


def test_copies_are_counted_only_where_that_is_needed_and_exact():
    problem, n_stages = dense(4)
    clusters = coarsen(problem)
    counts = lambda p: counts_copies(clusters, Machine.of(p, n_stages), range(4))  # noqa: E731
    assert counts(problem)
    assert not counts(replace(problem, multicast=True))
    assert not counts(replace(problem, placement=(0, 1, 0, 1)))
    assert not counts(replace(problem, links=((1.0,) * 4,) * 4))
    backwards = replace(problem, tensors=(Tensor("v3", ("v0", "v1"), 1.0),))
    assert not counts_copies(coarsen(backwards), Machine.of(backwards, n_stages), range(4))
