"""No cut at or below the target leaves its windows, and rivals never share a stage of one."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partitioners.oracle import (
    brute_force,
    choices_of,
    dense_blocks,
    legal_assignments,
    limits_of,
    loads_of,
    problems,
)  # fmt: skip

from pipecompile.partitioners import Node, Problem, Tensor
from pipecompile.partitioners.bounds.reachability import head_and_tail_sums, transitive_closure, transitive_reduction
from pipecompile.partitioners.bounds.separations import minimal_pairs, separated_pairs
from pipecompile.partitioners.bounds.stage_windows import StageWindows, compute_windows
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.ilp import boundary_windows
from pipecompile.partitioners.ilp.boundary_windows import tighten_windows
from pipecompile.partitioners.machine import Machine


def chain(*times: float, tensor: float = 0.0, **fields) -> Problem:
    names = [f"v{i}" for i in range(len(times))]
    pairs = tuple(zip(names, names[1:], strict=False))
    nodes = tuple(Node(name, time) for name, time in zip(names, times, strict=True))
    return Problem(nodes, precedence=pairs, tensors=tuple(Tensor(a, (b,), tensor) for a, b in pairs), **fields)


def found(problem: Problem, n_stages: int, target: float) -> list[tuple[int, int]]:
    windows = compute_windows(coarsen(problem), Machine.of(problem, n_stages), target)
    return list(zip(windows.earliest.tolist(), windows.latest.tolist(), strict=True))


def test_work_before_and_after_bounds_a_chain_from_both_sides():
    problem = chain(1, 1, 1, 1)
    assert compute_windows(coarsen(problem), Machine.of(problem, 3), 1.2).is_empty  # nothing is that good
    assert found(problem, 3, 2.0) == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert found(problem, 3, 4.0) == [(0, 2)] * 4
    assert found(problem, 3, inf) == [(0, 2)] * 4


def test_pins_and_pairs_apart_push_through_precedence():
    problem = chain(1, 1, 1, 1, pins={"v1": 1}, apart=(("v1", "v3"),))
    assert found(problem, 4, inf) == [(0, 1), (1, 1), (1, 3), (2, 3)]


def test_a_device_has_room_once_for_all_its_stages():
    assert found(chain(2, 2, 2, placement=(0, 0, 1)), 3, 4.0)[2] == (2, 2)


def test_rivals_are_too_much_for_one_stage_with_what_they_send():
    #  2 ── 2 ── 2 ── 2    three make 6, so the inner two, 4, send and receive 1 each
    problem = chain(2, 2, 2, 2, tensor=1.0)
    clusters, stages = coarsen(problem), Machine.of(problem, 4)
    reach = transitive_closure(clusters)
    assert minimal_pairs(clusters, separated_pairs(clusters, stages, 5.5, reach)) == [(1, 2)]
    assert minimal_pairs(clusters, separated_pairs(clusters, stages, 7.5, reach)) == [(0, 3)]
    assert not separated_pairs(clusters, stages, 8.5, reach).any()


def test_frontiers_close_what_windows_leave_open():
    names = [f"{side}{i}" for i in range(20) for side in "ab"]  # two chains side by side
    pairs = tuple(zip(names, names[2:], strict=False))
    tensors = tuple(Tensor(a, (b,), 1.0) for a, b in pairs)
    problem = Problem(tuple(Node(name, 1.0) for name in names), pairs, tensors)
    clusters, stages = coarsen(problem), Machine.of(problem, 4)
    for target, closed in ((10.5, True), (11.0, False)):  # one chain in two stages: 10 of work, and a tensor
        windows = compute_windows(clusters, stages, target)
        assert not windows.is_empty
        tighten_windows(clusters, stages, windows, target, inf)
        assert windows.is_empty == closed


@settings(max_examples=120, deadline=None)
@given(problems(max_nodes=7), st.floats(1.0, 30.0))
def test_every_cut_that_meets_the_target_is_inside(case, target):
    problem, n_stages = case
    clusters, stages = coarsen(problem), Machine.of(problem, n_stages)
    windows = compute_windows(clusters, stages, target)
    tighten_windows(clusters, stages, windows, target, inf)
    check_inside(problem, n_stages, target, windows)


@settings(max_examples=60, deadline=None)
@given(st.one_of(dense_blocks(), problems(max_nodes=7, direct=True)), st.sampled_from([1.0, 1.05, 1.3]))
def test_the_best_cut_is_inside_what_is_left_below_it(case, factor):
    problem, n_stages = case
    best, _ = brute_force(problem, n_stages)
    if best == inf:
        return
    clusters, stages, target = coarsen(problem), Machine.of(problem, n_stages), max(best, 1e-3) * factor * (1 + 1e-6)
    windows = compute_windows(clusters, stages, target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boundary_windows, "MIN_OPEN_STEPS", -1)  # however small
        tighten_windows(clusters, stages, windows, target, inf)
    assert not windows.is_empty
    check_inside(problem, n_stages, target * (1 - 1e-9), windows)


def check_inside(problem: Problem, n_stages: int, target: float, windows: StageWindows) -> None:
    """No cut at or below the target lies outside."""
    clusters = coarsen(problem)
    for stage_of in legal_assignments(problem, n_stages):
        stage = np.array([stage_of[names[0]] for names in clusters.members])
        for recompute in choices_of(problem, n_stages):
            rows = zip(loads_of(problem, stage_of, n_stages, recompute), limits_of(problem, n_stages), strict=True)
            if all(load <= target and memory <= limit for (load, memory), limit in rows):
                assert ((windows.earliest <= stage) & (stage <= windows.latest)).all()
                assert all(stage[a] < stage[b] for a, b in windows.strict_pairs)


@settings(max_examples=60, deadline=None)
@given(problems(max_nodes=9))
def test_ancestors_and_the_arcs_that_matter(case):
    clusters = coarsen(case[0])
    reach = transitive_closure(clusters)
    n = len(clusters)
    step = np.eye(n, dtype=bool)
    for a, b in transitive_reduction(clusters):
        step[a, b] = True
    assert (np.linalg.matrix_power(step.astype(float), n) > 0).tolist() == reach.tolist()
    before, after = head_and_tail_sums(clusters, np.array([clusters.time]))
    assert before[0] == pytest.approx(reach.T @ np.array(clusters.time))
    assert after[0] == pytest.approx(reach @ np.array(clusters.time))
