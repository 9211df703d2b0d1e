"""Orders respect precedence, differ, and follow a key where precedence permits."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from partitioners.oracle import legal_assignments, problems

from pipecompile.partitioners import Node, Problem
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.constraints import stage_ranges
from pipecompile.partitioners.dp.topological_orders import candidate_orders, order_by_key


@settings(max_examples=80, deadline=None)
@given(problems())
def test_orders_are_topological_and_distinct(case):
    clusters = coarsen(case[0])
    if not any(legal_assignments(*case)):
        return
    span = stage_ranges(clusters, case[1])
    result = [*candidate_orders(clusters, span), order_by_key(clusters, [0] * len(clusters), span)]
    assert len({tuple(order) for order in result[:-1]}) == len(result) - 1 >= 1
    for order in result:
        position = {cluster: number for number, cluster in enumerate(order)}
        assert sorted(order) == list(range(len(clusters)))
        assert all(position[a] < position[b] for a, b in clusters.arcs)
        for (a, last), (b, first) in itertools.product(*map(enumerate, reversed(span or ([], [])))):
            assert position[a] < position[b] or last >= first


def test_two_branches_are_walked_by_level_and_depth_first():
    #     ┌─▶ b ─▶ d ─┐
    #   a ┤           ├─▶ f
    #     └─▶ c ─▶ e ─┘
    pairs = ("ab", "ac", "bd", "ce", "df", "ef")
    clusters = coarsen(Problem(tuple(Node(x) for x in "abcdef"), precedence=tuple((p[0], p[1]) for p in pairs)))
    words = {"".join(clusters.members[v][0] for v in order) for order in candidate_orders(clusters)}
    assert {"abcdef", "abdcef"} <= words or {"abcdef", "acebdf"} <= words


def test_a_key_decides_where_precedence_does_not():
    clusters = coarsen(Problem(tuple(Node(x) for x in "abc"), precedence=(("b", "a"),)))
    key = [{"a": 0, "b": 2, "c": 1}[names[0]] for names in clusters.members]
    assert [clusters.members[v][0] for v in order_by_key(clusters, key)] == ["c", "b", "a"]
