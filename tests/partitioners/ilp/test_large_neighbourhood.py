"""Neighbourhoods around the bottleneck are reassigned until none improves the cut."""

from __future__ import annotations

from math import inf
from time import monotonic

from pipecompile.partitioners import Node, Problem
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.ilp.large_neighbourhood import improve_by_neighbourhoods
from pipecompile.partitioners.incumbent import SolverState
from pipecompile.partitioners.machine import Machine


def state_with(times: list[float], assignment: list[int], n_stages: int) -> SolverState:
    names = [f"v{i}" for i in range(len(times))]
    nodes = tuple(Node(name, time) for name, time in zip(names, times, strict=True))
    problem = Problem(nodes, precedence=tuple(zip(names, names[1:], strict=False)))
    state = SolverState(coarsen(problem), Machine.of(problem, n_stages), monotonic(), 60.0, None)
    state.offer(assignment)
    return state


def test_two_neighbouring_stages_are_balanced() -> None:
    state = state_with([1.0] * 6, [0, 0, 0, 0, 1, 2], 3)
    improve_by_neighbourhoods(state, 2, inf)
    assert state.bottleneck == 2.0
    assert (state.phase, state.method) == ("neighbourhood", "ilp")


def test_a_wider_neighbourhood_helps_where_the_only_neighbour_is_full() -> None:
    #  stage 0 [2 2 2]  1 [2 2]  2 [2]      0 and 1 together are no better than 6; all three give 4
    state = state_with([2.0] * 6, [0, 0, 0, 1, 1, 2], 3)
    improve_by_neighbourhoods(state, 2, inf)
    assert state.bottleneck == 6.0
    improve_by_neighbourhoods(state, 3, inf)
    assert state.bottleneck == 4.0


def test_a_passed_deadline_changes_nothing() -> None:
    state = state_with([1.0] * 6, [0, 0, 0, 0, 1, 2], 3)
    improve_by_neighbourhoods(state, 3, monotonic() - 1.0)
    assert state.bottleneck == 4.0
