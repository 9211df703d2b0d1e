"""The incumbent only improves, the bound only rises, and progress is reported."""

from __future__ import annotations

from math import inf
from time import monotonic

import pytest

from pipecompile.partitioners import Node, Problem, Progress
from pipecompile.partitioners.clusters import coarsen, merge
from pipecompile.partitioners.incumbent import GAP, SolverState
from pipecompile.partitioners.machine import Machine

PROBLEM = Problem(tuple(Node(name, 1.0) for name in "abcd"), precedence=(("a", "b"), ("b", "c"), ("c", "d")))


def new_state(reports: list[Progress] | None = None) -> SolverState:
    callback = None if reports is None else reports.append
    return SolverState(coarsen(PROBLEM), Machine.of(PROBLEM, 2), monotonic(), 60.0, callback)


def test_only_a_better_cut_becomes_the_incumbent() -> None:
    state = new_state()
    assert state.has_gap
    assert state.offer([0, 1, 1, 1])
    assert not state.offer([0, 0, 0, 1])
    assert state.bottleneck == 3.0
    assert state.offer([0, 0, 1, 1], method="ilp")
    assert (state.assignment, state.bottleneck, state.method) == ([0, 0, 1, 1], 2.0, "ilp")
    assert state.target == 2.0 * (1 - GAP / 2)


def test_a_cut_of_merged_clusters_is_projected() -> None:
    state = new_state()
    merged = merge(state.clusters, [(0, 1), (2, 3)])
    assert state.offer([0, 1], merged)
    assert state.assignment == [0, 0, 1, 1]


def test_the_bound_rises_to_the_bottleneck_and_closes_the_gap() -> None:
    state = new_state()
    state.offer([0, 0, 1, 1])
    state.raise_bound(1.5)
    state.raise_bound(1.0)
    assert state.lower_bound == 1.5
    assert state.has_gap
    state.raise_bound(5.0, "ilp")
    assert (state.lower_bound, state.method) == (2.0, "ilp")
    assert not state.has_gap


def test_news_are_reported_at_once_and_a_running_solver_at_intervals() -> None:
    reports: list[Progress] = []
    state = new_state(reports)
    state.enter("moves")
    state.offer([0, 0, 1, 1])
    state.raise_bound(1.0)
    assert [(report.phase, report.incumbent, report.bound) for report in reports] == [
        ("moves", inf, 0.0), ("moves", 2.0, 0.0), ("moves", 2.0, 1.0),
    ]  # fmt: skip
    state.report(1.5, 1.2)  # within the interval
    assert len(reports) == 3
    state.report(1.5, 1.8, force=True)
    assert (reports[-1].incumbent, reports[-1].bound) == (1.5, 1.5)


def test_the_gap_is_a_fraction_of_the_incumbent() -> None:
    assert Progress("orders", 4.0, 3.0, 0.0).gap == pytest.approx(0.25)
    assert Progress("orders", inf, 3.0, 0.0).gap == 1.0
    assert Progress("orders", 0.0, 0.0, 0.0).gap == 0.0
