"""A sample of benchmarks/partition_chains.py and benchmarks/partition_scale.py."""

from __future__ import annotations

import random

import pytest
from partition_chains import best_of_chain, chain, solve
from partition_scale import SHAPES, large

from pipecompile.partitioners import partition


def test_random_chains_are_cut_as_the_exact_chain_partition_is():
    draw = random.Random(0)
    drawn = [chain(draw) for _ in range(60)]
    assert max(len(times) for times, _ in drawn) == 2000
    for times, n_stages in drawn:
        result = solve(times, n_stages)
        assert result.exact
        assert result.proven


def test_the_exact_chain_partition_is_optimal():
    assert best_of_chain([4.0, 1.0, 1.0, 4.0, 2.0], 3) == 5.0
    assert best_of_chain([7.0, 1.0, 1.0], 2) == 7.0
    assert best_of_chain([1.0, 1.0], 5) == 1.0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_a_graph_of_thousands_of_nodes_is_cut_within_a_few_percent(shape):
    problem = large(shape, 2000, "even")
    result = partition(problem, 8, method="dp", time_limit=10.0)
    result.verify(problem, 8)
    assert result.gap <= 0.05
