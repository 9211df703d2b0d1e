"""Side branches are joined with their consumers, and what that can lose is known."""

from __future__ import annotations

import pytest

from pipecompile.partitioners import Node, Problem, Tensor
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.dp.side_branches import join_side_branches


def chain_with(*extra: Node, tensors: tuple[Tensor, ...], order: tuple[tuple[str, str], ...] = ()) -> Problem:
    """Return a ─▶ b ─▶ c with other nodes, whose data are tensors."""
    main = (Tensor("a", ("b",), 1.0), Tensor("b", ("c",), 1.0))
    nodes = (Node("a", 10.0), Node("b", 10.0), Node("c", 10.0), *extra)
    pairs = tuple((t.source, c) for t in (*main, *tensors) for c in t.consumers)
    return Problem(nodes, pairs + order, (*main, *tensors))


def joined(problem: Problem) -> tuple[set[frozenset[str]], dict[frozenset[str], float], float]:
    result = join_side_branches(coarsen(problem), 1.0)
    members = [frozenset(names) for names in result.clusters.members]
    reliefs = {names: seconds for names, seconds in zip(members, result.relief.tolist(), strict=True) if seconds}
    return set(members), reliefs, result.ratio


def test_noise_that_takes_less_than_its_tensor_loses_nothing():
    clusters, reliefs, ratio = joined(chain_with(Node("noise", 0.5), tensors=(Tensor("noise", ("b",), 1.0),)))
    assert clusters == {frozenset("a"), frozenset(("b", "noise")), frozenset("c")}
    assert (reliefs, ratio) == ({}, 1.0)


def test_a_table_of_positions_can_be_shed_where_it_gains_most():
    table = (Node("p", 3.0), Node("q", 2.0))
    tensors = (Tensor("p", ("q",), 1.0), Tensor("q", ("c",), 4.0))
    clusters, reliefs, ratio = joined(chain_with(*table, tensors=tensors))
    assert frozenset(("c", "p", "q")) in clusters
    assert reliefs == {frozenset(("c", "p", "q")): 2.0}  # p alone gains 3 - 1, p and q gain 5 - 4
    assert ratio == pytest.approx(4.0 / 2.0)  # the stage that computes p alone sends it


def test_a_mask_with_two_readers_stays_apart():
    clusters, reliefs, _ = joined(chain_with(Node("mask", 1.0), tensors=(Tensor("mask", ("b", "c"), 1.0),)))
    assert frozenset(("mask",)) in clusters
    assert not reliefs


def test_draws_in_order_are_joined_if_their_readers_keep_the_order():
    draws = (Node("first", 0.5), Node("second", 0.5))
    tensors = (Tensor("first", ("b",), 1.0), Tensor("second", ("c",), 1.0))
    clusters, _, _ = joined(chain_with(*draws, tensors=tensors, order=(("first", "second"),)))
    assert clusters == {frozenset("a"), frozenset(("b", "first")), frozenset(("c", "second"))}
    clusters, _, _ = joined(chain_with(*draws, tensors=tensors, order=(("second", "first"),)))
    assert frozenset(("c", "second")) not in clusters  # `first`, and b with it, would come after c


def test_a_second_tower_is_no_side_branch():
    tower = (Node("p", 1.0), Node("q", 8.0))
    problem = chain_with(*tower, tensors=(Tensor("p", ("q",), 0.5), Tensor("q", ("c",), 0.5)))
    result = join_side_branches(coarsen(problem), 1.0, most=2.0)
    assert len(result.clusters) == 5  # nor is its begin one
    assert result.is_exact


def test_views_of_a_table_are_joined_with_their_readers_and_the_table_is_a_relay():
    extra = (Node("table", 1.0), Node("view", 0.0), Node("scaled", 2.0))
    tensors = (Tensor("table", ("view", "scaled"), 1.0), Tensor("view", ("b",), 1.0), Tensor("scaled", ("c",), 1.5))
    result = join_side_branches(coarsen(chain_with(*extra, tensors=tensors)), 1.0)
    members = [frozenset(names) for names in result.clusters.members]
    assert set(members) == {frozenset("a"), frozenset(("b", "view")), frozenset(("c", "scaled")), frozenset(("table",))}
    assert result.relays == {members.index(frozenset(("table",)))}
    assert result.relief[members.index(frozenset(("c", "scaled")))] == 1.5  # 2 and 1 received, for 1.5
    assert result.relief.sum() == 1.5
    assert result.ratio == pytest.approx(2.5 / 1.5)
    assert not result.is_exact


def test_a_view_that_sends_less_than_it_reads_stays():
    extra = (Node("table", 1.0), Node("row", 0.0), Node("other", 0.0))
    tensors = (Tensor("table", ("row", "other"), 1.0), Tensor("row", ("b",), 0.5), Tensor("other", ("c",), 0.5))
    clusters, _, _ = joined(chain_with(*extra, tensors=tensors))
    assert frozenset(("row",)) in clusters
