"""The order after which little crosses, against the same rule computed anew for every ready cluster in every step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecompile.partitioners.clusters import Clusters, adjacency, coarsen
from pipecompile.partitioners.dp.traffic_order import least_traffic_order
from pipecompile.partitioners.problem import Node, Problem, Tensor


def _crossing(clusters: Clusters, placed: set[int]) -> float:
    ends = [({flow.source, *flow.consumers}, flow.time) for flow in clusters.flows]
    return sum(time for vertices, time in ends if vertices & placed and vertices - placed)


def _naive_order(clusters: Clusters, *, forward: bool) -> list[int]:
    predecessors, successors = adjacency(clusters)
    sources, sinks = (predecessors, successors) if forward else (successors, predecessors)
    missing = [len(before) for before in sources]
    ready, order = [v for v in range(len(clusters)) if not missing[v]], list[int]()
    while ready:
        v = min(reversed(ready), key=lambda v: _crossing(clusters, {*order, v}))
        ready.remove(v)
        order.append(v)
        for w in sinks[v]:
            missing[w] -= 1
            if not missing[w]:
                ready.append(w)
    return order[:: 1 if forward else -1]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    n = draw(st.integers(1, 12))
    tensors = []
    for source in range(n - 1):
        consumers = draw(st.sets(st.integers(source + 1, n - 1), max_size=3))
        if consumers:
            names = tuple(f"n{c}" for c in sorted(consumers))
            tensors.append(Tensor(f"n{source}", names, float(draw(st.integers(0, 3)))))
    return Problem(tuple(Node(f"n{v}", 1.0) for v in range(n)), tensors=tuple(tensors))


@given(problem=problems(), forward=st.booleans())
def test_the_next_cluster_is_the_one_after_which_least_crosses(problem, forward):
    clusters = coarsen(problem)

    assert least_traffic_order(clusters, forward=forward) == _naive_order(clusters, forward=forward)


@pytest.mark.parametrize("forward", [True, False])
def test_a_wide_graph_is_ordered_without_looking_at_all_ready_clusters_in_each_step(forward):
    n = 20_000
    problem = Problem(
        tuple(Node(f"n{v}", 1.0) for v in range(2 * n)),
        tensors=tuple(Tensor(f"n{v}", (f"n{v + n}",), 1.0) for v in range(n)),
    )

    order = least_traffic_order(coarsen(problem), forward=forward)  # minutes, if each step looked at all of them

    assert sorted(order) == list(range(2 * n))
    assert all(abs(a - b) == n for a, b in zip(order[::2], order[1::2], strict=True))  # each tensor is closed at once
