"""Cuts from filled stages are legal, and meet the target from either side where greedy filling can."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partitioners.oracle import brute_force, dense_blocks, problems

from pipecompile.partitioners import Node, Problem, Tensor
from pipecompile.partitioners.bounds.stage_windows import compute_windows
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.ilp.greedy_fill import fill_stages
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import bottleneck
from pipecompile.partitioners.verify import assignment_faults


def fill(problem: Problem, n_stages: int, target: float, *, forwards: bool) -> list[int] | None:
    clusters, machine = coarsen(problem), Machine.of(problem, n_stages)
    windows = compute_windows(clusters, machine, target)
    before = windows.earliest.copy(), windows.latest.copy()
    stage = None if windows.is_empty else fill_stages(clusters, machine, windows, target, 5.0, inf, forwards=forwards)
    assert (windows.earliest == before[0]).all()  # the windows of the caller stay
    assert (windows.latest == before[1]).all()
    return stage


def ladder(rungs: int) -> Problem:
    """Return two chains side by side."""
    names = [f"{side}{i}" for i in range(rungs) for side in "ab"]
    pairs = tuple(zip(names, names[2:], strict=False))
    tensors = tuple(Tensor(a, (b,), 1.0) for a, b in pairs)
    return Problem(tuple(Node(name, 1.0) for name in names), pairs, tensors)


@pytest.mark.parametrize("forwards", [True, False])
def test_a_stage_takes_as_much_as_it_can_and_leaves_as_little_as_it_can(forwards):
    problem = ladder(10)
    stage = fill(problem, 2, 11.0, forwards=forwards)
    assert stage is not None
    assert bottleneck(coarsen(problem), Machine.of(problem, 2), stage) == 10.0  # one chain each: nothing is sent


@settings(max_examples=60, deadline=None)
@given(st.one_of(dense_blocks(), problems(max_nodes=7)), st.sampled_from([1.0, 1.2, 2.0]), st.booleans())
def test_filled_cuts_are_legal(case, factor, forwards):
    problem, n_stages = case
    best, _ = brute_force(problem, n_stages)
    if best == inf:
        return
    clusters, machine = coarsen(problem), Machine.of(*case)
    stage = fill(problem, n_stages, max(best, 1e-3) * factor * (1 + 1e-6), forwards=forwards)
    if stage is not None:
        assert not assignment_faults(problem, clusters.stage_by_node(stage), n_stages)
        assert bottleneck(clusters, machine, stage) >= best * (1 - 1e-6)


@settings(max_examples=40, deadline=None)
@given(dense_blocks(), st.booleans())
def test_two_stages_are_filled_as_well_as_can_be(case, forwards):
    problem, _ = case
    best, _ = brute_force(problem, 2)
    stage = fill(problem, 2, best * (1 + 1e-5), forwards=forwards)
    assert stage is not None
    assert bottleneck(coarsen(problem), Machine.of(problem, 2), stage) <= best * (1 + 3e-3)
