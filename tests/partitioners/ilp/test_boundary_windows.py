"""Tightened windows keep every cut below the target, and refute targets that work bounds do not."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partitioners.oracle import brute_force, check_inside, dense_blocks, problems

from pipecompile.partitioners import Node, Problem, Tensor
from pipecompile.partitioners.bounds.stage_windows import compute_windows
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.ilp import boundary_windows
from pipecompile.partitioners.ilp.boundary_windows import tighten_windows
from pipecompile.partitioners.machine import Machine


def test_stage_programs_empty_windows_that_work_alone_leaves_open():
    names = [f"{side}{i}" for i in range(20) for side in "ab"]  # two chains side by side
    pairs = tuple(zip(names, names[2:], strict=False))
    tensors = tuple(Tensor(a, (b,), 1.0) for a, b in pairs)
    problem = Problem(tuple(Node(name, 1.0) for name in names), pairs, tensors)
    clusters, machine = coarsen(problem), Machine.of(problem, 4)
    for target, closed in ((10.5, True), (11.0, False)):  # one chain in two machine: 10 of work, and a tensor
        windows = compute_windows(clusters, machine, target)
        assert not windows.is_empty
        tighten_windows(clusters, machine, windows, target, inf)
        assert windows.is_empty == closed


@settings(max_examples=60, deadline=None)
@given(st.one_of(dense_blocks(), problems(max_nodes=7, direct=True)), st.sampled_from([1.0, 1.05, 1.3]))
def test_every_cut_below_a_target_near_the_optimum_is_inside_the_tightened_windows(case, factor):
    problem, n_stages = case
    best, _ = brute_force(problem, n_stages)
    if best == inf:
        return
    clusters, machine, target = coarsen(problem), Machine.of(problem, n_stages), max(best, 1e-3) * factor * (1 + 1e-6)
    windows = compute_windows(clusters, machine, target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boundary_windows, "MIN_OPEN_STEPS", -1)  # however small
        tighten_windows(clusters, machine, windows, target, inf)
    assert not windows.is_empty
    check_inside(problem, n_stages, target * (1 - 1e-9), windows)


@settings(max_examples=120, deadline=None)
@given(problems(max_nodes=7), st.floats(1.0, 30.0))
def test_every_cut_below_any_target_is_inside_the_tightened_windows(case, target):
    problem, n_stages = case
    clusters, machine = coarsen(problem), Machine.of(problem, n_stages)
    windows = compute_windows(clusters, machine, target)
    tighten_windows(clusters, machine, windows, target, inf)
    check_inside(problem, n_stages, target, windows)
