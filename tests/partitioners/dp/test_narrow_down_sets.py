"""Narrow down-sets are down-sets, with what leaves them; all of them where there are few, else those that the least leaves."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from partitioners.dp.test_stage_candidates import alone, graphs

from pipecompile.partitioners import Node, Problem, Tensor
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.dp import narrow_down_sets
from pipecompile.partitioners.dp.down_set_listing import list_down_sets
from pipecompile.partitioners.dp.narrow_down_sets import list_narrow_down_sets
from pipecompile.partitioners.machine import Machine


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_all_down_sets_are_listed_where_there_are_few(problem):
    clusters = coarsen(problem)
    listing = list_narrow_down_sets(alone(clusters), 2, 1.0, inf)
    whole = list_down_sets(alone(clusters), Machine.of(problem, 2), 1e6)
    assert sorted(listing.masks) == sorted(whole.masks)
    leaving = dict(zip(whole.masks, whole.leaving, strict=True))
    assert listing.leaving.tolist() == pytest.approx([leaving[mask] for mask in listing.masks])


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_a_narrow_beam_leads_from_nothing_to_all(problem):
    clusters = coarsen(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(narrow_down_sets, "MAX_WIDTH", 1)
        listing = list_narrow_down_sets(alone(clusters), 2, 1.0, inf)
    assert sorted(mask.bit_count() for mask in listing.masks) == list(range(len(clusters) + 1))
    assert all(not mask >> b & 1 or mask >> a & 1 for mask in listing.masks for a, b in clusters.arcs)


def test_a_level_keeps_the_down_sets_that_the_least_leaves(monkeypatch):
    nodes = tuple(Node(name, 1.0) for name in "abz")
    problem = Problem(nodes, (("a", "z"), ("b", "z")), (Tensor("a", ("z",), 2.0), Tensor("b", ("z",), 1.0)))
    monkeypatch.setattr(narrow_down_sets, "MAX_WIDTH", 1)
    listing = list_narrow_down_sets(alone(coarsen(problem)), 2, 1.0, inf)
    assert listing.leaving.tolist() == [0.0, 1.0, 3.0, 0.0]
    assert list_narrow_down_sets(alone(coarsen(problem)), 2, 1.0, 0.0) is None
