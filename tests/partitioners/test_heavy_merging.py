"""Merged pairs close no cycle, stay within the work and the stages that are allowed, and the heaviest come first."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from partitioners.dp.test_stage_candidates import graphs

from pipecompile.partitioners import Node, Problem, Tensor
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.heavy_merging import merge_heavy_pairs


def chain(seconds: list[float]) -> Problem:
    names = [f"v{i}" for i in range(len(seconds) + 1)]
    tensors = tuple(Tensor(names[i], (names[i + 1],), time) for i, time in enumerate(seconds))
    return Problem(tuple(Node(name, 1.0) for name in names), tuple((t.source, *t.consumers) for t in tensors), tensors)


def test_the_pair_with_the_longest_tensors_is_merged_first():
    coarse = merge_heavy_pairs(coarsen(chain([1.0, 5.0, 1.0])), 2.0)
    assert coarse.members == (("v0",), ("v1", "v2"), ("v3",))


def test_clusters_of_different_stages_stay_apart():
    coarse = merge_heavy_pairs(coarsen(chain([1.0, 5.0, 1.0])), 9.0, [0, 0, 1, 1])
    assert coarse.members == (("v0", "v1"), ("v2", "v3"))


@settings(max_examples=80, deadline=None)
@given(graphs(), st.sampled_from((1.0, 4.0, 9.0)), st.integers(0, 3))
def test_no_cycle_is_merged_and_no_cluster_is_heavier_than_allowed(problem, most, seed):
    clusters = coarsen(problem)
    coarse = merge_heavy_pairs(clusters, most, draw=Random(seed))
    assert max(coarse.time) <= max(most, *clusters.time)
    assert sum(coarse.time) == sum(clusters.time)
    assert all(a < b for a, b in coarse.arcs)
