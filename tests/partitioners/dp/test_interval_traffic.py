"""The amounts of every interval of an order equal their definition."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from partitioners.oracle import problems

from pipecompile.partitioners import Node, Problem, Shared, Tensor
from pipecompile.partitioners.clusters import Clusters, coarsen
from pipecompile.partitioners.dp.interval_traffic import interval_columns

#  v0 ─▶ v1 ─▶ v2    v0 is consumed by both others, and v2 sends a gradient back to v0
NODES = tuple(Node(f"v{i}") for i in range(3))
TENSORS = (Tensor("v0", ("v1", "v2"), 1.0, 10.0), Tensor("v2", ("v0",), 4.0))


def test_a_tensor_with_two_consumers_and_a_gradient() -> None:
    clusters = coarsen(Problem(NODES, tensors=TENSORS, shared=(Shared(("v0", "v2"), 7.0),)))
    sent, received, inbox, shared = (list(column) for column in list(columns_of(clusters, multicast=True))[1])
    assert sent == [1.0, 0.0]  # the intervals [0, 2) and [1, 2)
    assert received == [4.0, 1.0]
    assert inbox == [0.0, 10.0]
    assert shared == [7.0, 0.0]


def columns_of(clusters: Clusters, *, multicast: bool):
    return interval_columns(clusters, range(len(clusters)), [0] * (len(clusters) + 1), multicast=multicast)


def amounts(clusters: Clusters, i: int, j: int) -> tuple[float, float, float, float]:
    """Return sent, received, inbox and shared of [i, j) by their definition, with multicast."""
    inside = range(i, j)
    sent = received = inbox = 0.0
    for flow in clusters.flows:
        if flow.source in inside:
            sent += flow.time * any(c not in inside for c in flow.consumers)
        elif any(c in inside for c in flow.consumers):
            received, inbox = received + flow.time, inbox + flow.bytes
    return sent, received, inbox, sum(size for users, size in clusters.shared if any(v in inside for v in users))


@settings(max_examples=60, deadline=None)
@given(problems(max_nodes=8))
def test_every_interval_has_the_amounts_of_the_definition(case) -> None:
    clusters = coarsen(case[0])
    for j, column in enumerate(columns_of(clusters, multicast=True), start=1):
        for i, row in enumerate(zip(*column, strict=True)):
            assert row == pytest.approx(amounts(clusters, i, j), abs=1e-9)


def test_without_multicast_a_sender_pays_once_per_side() -> None:
    tensors = (Tensor("v1", ("v0", "v2"), 1.0),)
    clusters = coarsen(Problem(NODES, tensors=tensors))
    assert [list(column[0]) for column in columns_of(clusters, multicast=False)] == [[0.0], [1.0, 2.0], [0.0, 1.0, 0.0]]
    assert [list(column[0]) for column in columns_of(clusters, multicast=True)] == [[0.0], [1.0, 1.0], [0.0, 1.0, 0.0]]


def test_a_column_begins_at_its_least_start() -> None:
    clusters = coarsen(Problem(NODES, tensors=TENSORS))
    full = list(columns_of(clusters, multicast=True))
    short = list(interval_columns(clusters, range(3), [0, 0, 1, 2], multicast=True))
    for j, low in ((2, 1), (3, 2)):
        for column, part in zip(full[j - 1], short[j - 1], strict=True):
            assert list(part) == pytest.approx(list(column[low:]))


def test_a_sender_pays_for_as_many_receivers_as_were_counted():
    nodes = tuple(Node(name, 1.0) for name in "abcd")
    clusters = coarsen(Problem(nodes, tensors=(Tensor("a", ("b", "c", "d"), 2.0),), multicast=False))
    columns = list(interval_columns(clusters, range(4), [0] * 5, multicast=False, copies=[3]))
    sent, received, _, _ = columns[0]  # the interval [0, 1): a alone
    assert (sent[0], received[0]) == (6.0, 0.0)
    sent, received, _, _ = columns[3]
    assert sent.tolist() == [0.0, 0.0, 0.0, 0.0]
    assert received.tolist() == [0.0, 2.0, 2.0, 2.0]
