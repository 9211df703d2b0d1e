"""Tables have the down-sets between which a cut within the target can have its boundaries."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from partitioners.dp.test_stage_candidates import alone, graphs

from pipecompile.partitioners import Node, Problem, Tensor
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.dp import down_set_listing
from pipecompile.partitioners.dp.down_set_listing import list_down_sets
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import bottleneck


def test_a_chain_has_a_down_set_per_boundary_and_work_decides_which_can_be_one():
    nodes = tuple(Node(str(i), 1.0) for i in range(6))
    problem = Problem(nodes, tuple((str(i), str(i + 1)) for i in range(5)))
    listing = list_down_sets(alone(coarsen(problem)), Machine.of(problem, 3), 6.0)
    assert listing.table(3, 6.0).work.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert listing.table(3, 2.0).work.tolist() == [0, 2, 4, 6]


def test_a_boundary_that_much_leaves_is_none():
    nodes = tuple(Node(str(i), 1.0) for i in range(4))
    arcs = tuple((str(i), str(i + 1)) for i in range(3))
    tensors = tuple(Tensor(a, (b,), 0.1 if a == "0" else 1.5) for a, b in arcs)
    problem = Problem(nodes, arcs, tensors)
    listing = list_down_sets(alone(coarsen(problem)), Machine.of(problem, 2), 4.0)
    assert listing.table(2, 4.0).work.tolist() == [0, 1, 2, 4]
    assert listing.table(2, 3.2).work.tolist() == [0, 1, 4]


@settings(max_examples=100, deadline=None)
@given(graphs(), st.integers(2, 3), st.sampled_from((1.0, 1.2, 2.0)))
def test_every_boundary_of_a_best_cut_is_in_the_table(problem, n_stages, share):
    clusters, machine = coarsen(problem), Machine.of(problem, n_stages)
    cuts = product(range(n_stages), repeat=len(clusters))
    legal = [cut for cut in cuts if all(cut[a] <= cut[b] for a, b in clusters.arcs)]
    optimum, stages = min((bottleneck(clusters, machine, cut), cut) for cut in legal)
    listing = list_down_sets(alone(clusters), machine, optimum * share + 1e-6)
    table = listing.table(n_stages, optimum + 1e-6)
    rows = {tuple(row) for row in table.inside.tolist()}
    assert all(tuple(stage < s for stage in stages) in rows for s in range(n_stages + 1))
    assert all((np.diff(table.work) >= 0).tolist())
    assert not any((after <= before).all() and (after != before).any() for before, after in pairwise(table.inside))


def test_too_many_down_sets_are_declined(monkeypatch):
    nodes = tuple(Node(str(i), 1.0) for i in range(8))  # no precedence: 2 ** 8 down-sets, 70 of them with four clusters
    branches, machine = alone(coarsen(Problem(nodes))), Machine.of(Problem(nodes), 3)
    listing = list_down_sets(branches, machine, 8.0)
    assert len(listing.table(3, 8.0)) == 256
    monkeypatch.setattr(down_set_listing, "MAX_DOWN_SETS", 200)
    assert listing.table(3, 8.0) is None
    assert len(listing.table(3, 3.0)) == 170
    for name, most in (("MAX_PASSED", 100), ("MAX_WIDTH", 30)):
        with monkeypatch.context() as patch:
            patch.setattr(down_set_listing, name, most)
            assert list_down_sets(branches, machine, 8.0) is None
    assert list_down_sets(branches, machine, 8.0, deadline=0.0) is None
