"""Boundaries slide to cuts with a short step where slow transfers make the least bottleneck leave devices empty."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement

from partitioners.test_annealing import grid, objective

from pipecompile.partitioners import Node, Problem, Tensor, partition
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.constraints import stage_ranges
from pipecompile.partitioners.sliding_cuts import least_work, sliding_cuts


def slow_chain(times: list[float], transfer: float) -> Problem:
    """Return a chain of operations with transfers of so many seconds between them, forward and back."""
    names = [f"n{i}" for i in range(len(times))]
    pairs = list(zip(names, names[1:], strict=False))
    nodes = tuple(Node(name, time, forward=time / 3) for name, time in zip(names, times, strict=True))
    return Problem(nodes, tuple(pairs), tuple(Tensor(a, (b,), transfer) for a, b in pairs))


def test_a_chain_with_slow_links_uses_several_devices():
    problem = slow_chain([2.0, 3.0, 1.0, 4.0, 2.0, 3.0, 1.0, 4.0], 11.0)
    assert len(set(partition(problem, 4).stage_of.values())) == 1  # what is sent counts as work of both
    estimate = objective(problem, 4, microbatches=32)
    best = sliding_cuts(estimate, None, 1)[0]
    assert len(set(best)) > 1
    assert estimate.score(best)[0] < 0.6 * estimate.score([0] * 8)[0]


def test_a_short_chain_gets_the_best_of_all_cuts():
    for transfer in (0.5, 2.0, 6.0):
        problem = slow_chain([2.0, 3.0, 1.0, 4.0, 2.0, 3.0], transfer)
        estimate = objective(problem, 3)
        every = combinations_with_replacement(range(3), 6)
        assert estimate.score(sliding_cuts(estimate, None, 1)[0])[0] <= 1.02 * min(
            estimate.score(cut)[0] for cut in every
        )


def test_cuts_are_the_same_every_time_and_sorted():
    estimate = objective(grid(1), 3)
    cuts = sliding_cuts(estimate, None, 4)
    assert cuts == sliding_cuts(estimate, None, 4)
    assert [estimate.score(cut) for cut in cuts] == sorted(estimate.score(cut) for cut in cuts)
    clusters = coarsen(grid(1))
    assert all(cut[a] <= cut[b] for cut in cuts for a, b in clusters.arcs)


def test_a_pin_holds():
    pinned = replace(slow_chain([2.0] * 6, 8.0), pins={"n1": 1})
    estimate = objective(pinned, 3)
    assert {cut[1] for cut in sliding_cuts(estimate, stage_ranges(estimate.clusters, 3), 4)} == {1}


def test_without_transfers_there_is_nothing_to_slide():
    assert sliding_cuts(objective(slow_chain([2.0] * 6, 0.0), 3), None, 4) == []


def test_the_least_work_is_that_of_an_even_cut():
    assert least_work(objective(slow_chain([2.0] * 6, 100.0), 3), None) == 4.0
