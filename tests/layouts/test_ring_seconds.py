"""Seconds of collectives: by hand, in a node and over nodes."""

from __future__ import annotations

import pytest

import pipecompile as pc
from pipecompile.layouts.enumeration import Layout
from pipecompile.layouts.ring_seconds import Ring, pair_bandwidths, ring_along

CLUSTER = pc.Cluster(device="h100", nodes=2, devices_per_node=4, link_inside=100.0, link_between=10.0)


def test_halves_and_an_all_reduce_by_hand() -> None:
    ring = Ring(4, 100.0, 0.5)
    assert ring.half(400.0) == pytest.approx(3 * (1.0 + 0.5))
    assert ring.all_reduce(400.0) == pytest.approx(9.0)
    assert Ring(1, 100.0, 0.5).all_reduce(400.0) == 0
    assert ring.half(0.0) == 0


def test_a_ring_in_a_node_uses_its_links_and_one_over_nodes_all_adapters_of_its_members() -> None:
    assert ring_along(CLUSTER, Layout(2, 4), "dp").bandwidth == 100  # ranks 0 1 2 3
    assert ring_along(CLUSTER, Layout(1, 8), "dp").bandwidth == 40  # 4 members in a node
    assert ring_along(CLUSTER, Layout(2, 4, pp_first=False), "dp").bandwidth == 20  # ranks 0 2 4 6
    assert ring_along(CLUSTER, Layout(4, 2, pp_first=False), "dp").bandwidth == 10  # ranks 0 4
    assert ring_along(CLUSTER, Layout(8), "dp").size == 1


def test_pairs_of_a_pipeline_cross_nodes_where_its_ranks_do() -> None:
    assert pair_bandwidths(CLUSTER, Layout(4, 2, pp_first=False)) == 100  # ranks 0 1 2 3
    pairs = pair_bandwidths(CLUSTER, Layout(4, 2))  # ranks 0 2 4 6
    assert isinstance(pairs, dict)
    assert len(pairs) == 12
    assert (pairs[0, 1], pairs[1, 2], pairs[2, 1], pairs[3, 0]) == (100, 10, 10, 10)
